"""The ragged cache and the rows above it: memory, and who shares a prompt. That all is where it belongs,
`test_token_identity.py` says."""

from dataclasses import replace

import torch

from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.rows import Request, Rows
from spec_trl.generation.engine.saved_row import SavedRow


CPU = torch.device("cpu")


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_layers_are_allocated_by_need_and_by_dtype() -> None:
    cache = RaggedCache(layers=3, rows=2, columns=4)
    assert cache.column_bytes == 0
    cache.point_at(torch.zeros(2, 1).long(), 4, first_row=0)
    cache.update(states(2, 1, 1, 2), states(2, 1, 1, 2).bfloat16(), 0)
    assert cache.column_bytes == 2 * (4 + 2)
    assert not cache.layers[0].keys[:, :, 1:].any(), "an unwritten column must be finite: it is masked, not skipped"
    with torch.autocast("cpu", torch.bfloat16):  # stored as it is read
        keys, values = cache.update(states(2, 1, 1, 2), states(2, 1, 1, 2).bfloat16(), 1)
    assert keys.dtype == values.dtype == torch.bfloat16


# ---- Rows ------------------------------------------------------------------------------------------------------


def request(index: int, prompt: list[int], new: int = 5) -> Request:
    return Request(index, torch.tensor(prompt), len(prompt) + new, stream=100 + index)


def test_admission_groups_copies_after_their_leader() -> None:
    rows = Rows(6, 20, CPU)
    admission = rows.admit([request(0, [1, 2, 3]), request(1, [4]), request(2, [1, 2, 3]), request(3, [5, 6])])
    # Leaders by length: [4], [5, 6], [1, 2, 3]; then the copy of the last.
    assert rows.requests.tolist() == [1, 3, 0, 2]
    assert rows.lengths.tolist() == rows.prompt_lengths.tolist() == [1, 2, 3, 3]
    assert rows.limits.tolist() == [6, 7, 8, 8]
    assert rows.streams.tolist() == [101, 103, 100, 102]
    assert (admission.first, admission.leaders, admission.followers, admission.sources) == (0, 3, [3], [2])
    assert rows.longest == 3
    later = rows.admit([request(4, [5, 6]), request(5, [9])])
    assert (later.first, later.leaders, later.followers, later.sources) == (4, 1, [5], [1])
    assert rows.requests.tolist() == [1, 3, 0, 2, 5, 4]


def test_a_row_whose_states_are_on_their_way_is_no_source() -> None:
    """Another rank sends the tail of its K/V, the prompt's perhaps; once it is here, later rows may copy it."""
    rows = Rows(4, 20, CPU)
    moved = replace(request(0, [1, 2, 3]), saved=SavedRow(torch.tensor([7, 8]), None, 0, {}))
    admission = rows.admit([moved, request(1, [1, 2, 3]), request(2, [1, 2, 3])])
    assert rows.requests.tolist() == [1, 0, 2] and list(admission.saved) == [1]
    assert (admission.leaders, admission.followers, admission.sources) == (2, [2], [0])
    rows.drop([0, 2])
    assert rows.admit([request(3, [1, 2, 3])]).sources == [0]


def test_a_prompt_is_not_shared_with_a_row_that_left() -> None:
    rows = Rows(3, 20, CPU)
    rows.admit([request(0, [1, 2]), request(1, [3, 4, 5])])
    assert rows.drop([0]) == ([1], [0])
    assert rows.requests.tolist() == [1] and rows.prompts == [torch.tensor([3, 4, 5]).numpy().tobytes()]
    admission = rows.admit([request(2, [1, 2]), request(3, [3, 4, 5])])
    assert (admission.leaders, admission.sources) == (1, [0])
