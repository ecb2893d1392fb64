"""The ragged cache and the rows above it, by hand."""

import pytest
import torch

from spec_trl.generation.engine.cache import RaggedCache, check_memory
from spec_trl.generation.engine.rows import Request, Rows


CPU = torch.device("cpu")


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_every_row_writes_at_its_own_columns() -> None:
    cache = RaggedCache(layers=1, rows=3, columns=10)
    positions = torch.tensor([[0, 1], [4, 5], [8, 9]])
    cache.point_at(positions, 10, first_row=0)
    keys, values = states(3, 2, 2, 4), states(3, 2, 2, 6)  # K and V of different head sizes (MLA)
    read_keys, read_values = cache.update(keys, values, 0)
    assert read_keys.shape == (3, 2, 10, 4) and read_values.shape == (3, 2, 10, 6)
    for row in range(3):
        for query in range(2):
            assert torch.equal(read_keys[row, :, positions[row, query]], keys[row, :, query])
            assert torch.equal(read_values[row, :, positions[row, query]], values[row, :, query])
    written = torch.zeros(3, 10, dtype=torch.bool).scatter_(1, positions, True)
    assert not read_keys.transpose(1, 2)[~written].any(), "nothing else was touched"


def test_a_part_of_the_rows() -> None:
    cache = RaggedCache(layers=2, rows=4, columns=8)
    cache.point_at(torch.zeros(4, 1).long(), 8, first_row=0)
    first = cache.update(states(4, 1, 1, 2), states(4, 1, 1, 2), 1)[0].clone()
    cache.point_at(torch.tensor([[2], [3]]), 5, first_row=1)
    part = cache.update(torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2), 1)[0]
    assert part.shape == (2, 1, 5, 2)
    assert part[0, 0, 2].tolist() == part[1, 0, 3].tolist() == [1, 1]
    whole = cache.layers[1].keys
    assert torch.equal(whole[[0, 3]], first[[0, 3]])
    assert torch.equal(whole[1:3, :, 0], first[1:3, :, 0])


def test_layers_are_allocated_by_need_and_by_dtype() -> None:
    cache = RaggedCache(layers=3, rows=2, columns=4)
    assert cache.bytes == 0
    cache.point_at(torch.zeros(2, 1).long(), 4, first_row=0)
    cache.update(states(2, 1, 1, 2), states(2, 1, 1, 2).bfloat16(), 0)
    assert cache.bytes == 2 * 4 * 2 * (4 + 2)
    assert not cache.layers[0].keys[:, :, 1:].any(), "an unwritten column must be finite: it is masked, not skipped"


def test_under_autocast_the_cache_is_stored_as_it_is_read() -> None:
    cache = RaggedCache(layers=1, rows=1, columns=4)
    cache.point_at(torch.zeros(1, 1).long(), 4, first_row=0)
    with torch.autocast("cpu", torch.bfloat16):
        keys, values = cache.update(states(1, 1, 1, 2), states(1, 1, 1, 2).bfloat16(), 0)
    assert keys.dtype == values.dtype == torch.bfloat16


def test_copying_rows() -> None:
    cache = RaggedCache(layers=2, rows=4, columns=6)
    cache.point_at(torch.arange(6).expand(4, 6), 6, first_row=0)
    cache.update(states(4, 1, 6, 2), states(4, 1, 6, 3), 0)
    layer = cache.layers[0]
    before = layer.keys.clone(), layer.values.clone()
    cache.copy_rows([3, 2], [0, 1], 4)
    for old, new in zip(before, (layer.keys, layer.values), strict=True):
        assert torch.equal(new[0, :, :4], old[3, :, :4]) and torch.equal(new[1, :, :4], old[2, :, :4])
        assert torch.equal(new[:2, :, 4:], old[:2, :, 4:]), "columns beyond those asked for stay"
        assert torch.equal(new[2:], old[2:])


def test_moving_columns() -> None:
    """Source and destination overlap."""
    cache = RaggedCache(layers=2, rows=3, columns=6)
    cache.point_at(torch.arange(6).expand(3, 6), 6, first_row=0)
    cache.update(states(3, 1, 6, 2), states(3, 1, 6, 3), 1)
    layer = cache.layers[1]
    before = layer.keys.clone(), layer.values.clone()
    cache.move_columns(torch.tensor([[1, 4], [3, 0]]), torch.tensor([[0, 1], [2, 3]]))
    for old, new in zip(before, (layer.keys, layer.values), strict=True):
        assert torch.equal(new[0], old[0][:, [1, 4, 2, 3, 4, 5]])
        assert torch.equal(new[1], old[1][:, [0, 1, 3, 0, 4, 5]])
        assert torch.equal(new[2], old[2])


def test_memory() -> None:
    check_memory("nothing", 0, CPU)
    with pytest.raises(
        ValueError, match=r"the moon would not fit in memory: 1048576.0 GiB are needed and \d+\.\d GiB"
    ):
        check_memory("the moon", 2**50, CPU)


# ---- Rows ------------------------------------------------------------------------------------------------------


def request(index: int, prompt: list[int], new: int = 5) -> Request:
    return Request(index, torch.tensor(prompt), len(prompt) + new, stream=100 + index)


def test_admission_groups_copies_behind_their_leader() -> None:
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


def test_a_prompt_is_not_shared_with_a_row_that_left() -> None:
    rows = Rows(3, 20, CPU)
    rows.admit([request(0, [1, 2]), request(1, [3, 4, 5])])
    assert rows.drop([0]) == ([1], [0])
    assert rows.requests.tolist() == [1] and rows.prompts == [torch.tensor([3, 4, 5]).numpy().tobytes()]
    admission = rows.admit([request(2, [1, 2]), request(3, [3, 4, 5])])
    assert (admission.leaders, admission.sources) == (1, [0])


def test_committing_and_dropping() -> None:
    rows = Rows(4, 20, CPU)
    rows.admit([request(i, [i + 1] * (i + 1)) for i in range(4)])
    rows.write(0, torch.tensor([[10, 11], [20, 21], [30, 31], [40, 41]]))
    rows.commit(torch.tensor([1, 2, 0, 2]), torch.tensor([[-1.0, -2], [-3, -4], [-5, -6], [-7, -8]]))
    assert rows.lengths.tolist() == [2, 4, 3, 6] and rows.generated.tolist() == [1, 2, 0, 2]
    assert rows.window(-1, 1).flatten().tolist() == [10, 21, 3, 41]
    assert rows.columns_behind(-1, 2).tolist() == [[1, 2], [3, 4], [2, 3], [5, 6]]
    assert rows.drop([0, 2]) == ([3], [0])
    assert rows.requests.tolist() == [3, 1] and rows.lengths.tolist() == [6, 4]
    assert rows.tokens[0, :6].tolist() == [4, 4, 4, 4, 40, 41]
    assert rows.logprobs[0, 4:6].tolist() == [-7, -8]
    assert rows.drop([0, 1]) == ([], []) and rows.active == 0
