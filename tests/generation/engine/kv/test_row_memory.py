"""Where memory ends rows leave, come back and have the same tokens; memory is simulated, in columns of K/V."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)

from spec_trl.generation import generate as one_call
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv import memory, row_memory
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.kv.row_memory import RowMemory, RowNeeds
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.parked_rows import ParkedRows
from spec_trl.generation.engine.rollout import RequestQueue
from spec_trl.generation.engine.rows import Request, Rows
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from tests.conftest import tiny_llama
from tests.distributed import test_pool as pools
from tests.generation.calls import generate, outputs, pad_left, random_rows


ENDS: dict[str, Any] = {"eos_token_id": 5, "max_new_tokens": 120}  # lengths with a long tail, 64 without it
PROMPTS = pad_left([row for row in random_rows([5, 9, 7, 4]) for _ in range(2)])
LIMIT = 129


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has each further generation find memory for so many columns, all rows together."""
    watched_rows: dict[int, tuple[Rows, RowNeeds]] = {}  # of the generation in each thread
    make = RowMemory.__init__

    def watched(self: RowMemory, rows: Rows, needs: RowNeeds) -> None:
        watched_rows[threading.get_ident()] = rows, needs
        make(self, rows, needs)

    def limit(columns: int) -> None:
        def free(device: torch.device) -> float:
            rows, needs = watched_rows[threading.get_ident()]
            return needs.fixed + rows.active * needs.row + (columns - sum(rows.host_lengths)) * needs.column

        monkeypatch.setattr(row_memory, "free_memory", free)

    monkeypatch.setattr(RowMemory, "__init__", watched)
    return limit


KINDS = ["none", "self", "ngram", "history", "model", "eagle3", "mtp", "tts self run", "decoupled"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_leave_and_come_back_have_the_same_tokens(
    kind: str, tiny: LlamaForCausalLM, drafters: Callable[..., list[Drafter]], memory_of: Callable[[int], None]
) -> None:
    plain = outputs(generate(tiny, PROMPTS, **ENDS))
    own = [] if kind == "none" else drafters("self" if kind == "decoupled" else kind)
    if kind == "decoupled":
        own = [DecoupledDrafter(DraftThread(own[0]))]
    memory_of(330)
    found = generate(tiny, PROMPTS, drafter=own, **ENDS)
    assert outputs(found) == plain
    assert found.statistics.preemptions >= 3 and found.statistics.drafter_failure is None


def test_no_bit_differs_after_they_came_back(narrow: LlamaForCausalLM, memory_of: Callable[[int], None]) -> None:
    """What they had generated is read again as steps computed it, and not as a prompt."""
    plain = generate(narrow, PROMPTS, **ENDS)
    memory_of(330)
    found = generate(narrow, PROMPTS, "ngram", **ENDS)
    assert found.statistics.preemptions >= 3 and found.statistics.total.drafted > 20
    assert outputs(found) == outputs(plain) and torch.equal(found.logprobs, plain.logprobs)


def test_rows_of_a_pool_come_back_too(tiny: LlamaForCausalLM, memory_of) -> None:
    plain = outputs(generate(tiny, PROMPTS, **ENDS))
    memory_of(200)
    texts, _, found = pools.decode(
        2,
        list(range(8)),
        4,
        lambda _, make: generate(tiny, PROMPTS, "none", {"max_batch_size": 4}, make_queue=make, **ENDS),
    )
    assert texts == plain and sum(each.statistics.preemptions for each in found) >= 1


def test_memory_that_lasts_moves_nobody(tiny: LlamaForCausalLM, memory_of) -> None:
    memory_of(8 * (LIMIT + 64))
    assert generate(tiny, PROMPTS, **ENDS).statistics.preemptions == 0


def test_one_row_that_can_never_fit_is_refused(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 9 + 24 + 5 columns of 2 layers x K and V x 2 heads x 16 in float64."""
    needed = 2 * 2 * 2 * 16 * 8 * (9 + 24 + 5)
    monkeypatch.setattr(memory, "LITTLE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    assert generate(tiny, PROMPTS, config={"draft_length": 5}).statistics.preemptions == 0
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"K/V cache.*1 x 38 x 2.* would not fit.*Lower `max_new_tokens`"):
        generate(tiny, PROMPTS, config={"draft_length": 5})


class Unmarked(LogitsProcessor):
    """Does nothing, but does not say that it looks at each row alone."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_rows_in_step_must_fit_together(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay until the last one ends."""
    needed = 8 * 2 * 2 * 2 * 16 * 8 * (9 + 24 + 5)
    options: dict[str, Any] = {"config": {"draft_length": 5}, "logits_processor": LogitsProcessorList([Unmarked()])}
    monkeypatch.setattr(memory, "LITTLE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    assert generate(tiny, PROMPTS, **options).statistics.preemptions == 0
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match="K/V of 8 rows x 38 columns would not fit.*max_batch_size"):
        generate(tiny, PROMPTS, **options)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def row_memory_of(lengths: Sequence[int], needs: RowNeeds, capacity: int = 8) -> RowMemory:
    rows = Rows(capacity, 1000, torch.device("cpu"))
    rows.admit([Request(index, torch.ones(1).long(), 500, 0) for index in range(len(lengths))])
    rows.commit(np.array(lengths), None)
    return RowMemory(rows, needs)


def test_rows_are_admitted_while_each_may_grow_by_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [Request(index, torch.ones(6).long(), 500, 0) for index in range(4)]
    # Rows of 101 and 21 columns grow by 100 and 64; a new one by 64, from 6.
    needed = 7 + 2 * 3 + 2 * (100 + 64) + 3 * (2 * (6 + 64) + 3)
    for free, count in ((needed, 3), (needed - 1, 2)):
        monkeypatch.setattr(row_memory, "free_memory", lambda device, free=free: free)
        own = row_memory_of([101, 21], RowNeeds(column=2, row=3, fixed=7))
        assert not own.is_full and own.fitting(waiting) == count and not own.is_full
        assert own.fitting(waiting[:1]) == 1
        own = row_memory_of([101, 21], RowNeeds(2, 3 + 1000, 7, states=1000))  # rows in flight have taken them
        assert own.fitting(waiting) == 0
        monkeypatch.setattr(row_memory, "free_memory", lambda device, free=free: free + 3000)
        assert own.fitting(waiting) == count
    monkeypatch.setattr(row_memory, "free_memory", lambda device: 0)
    assert row_memory_of([], RowNeeds(2, 3, 7)).fitting(waiting) == 1, "else nobody would ever decode"
    full = row_memory_of([101, 21], RowNeeds(2, 3, 7))
    assert full.fitting(waiting) == 0 and full.is_full


def test_the_shortest_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def free(device: torch.device) -> int:
        looks.append(1)
        return 2 * 3 * 64 - 1  # one byte short of a page for each of three rows

    monkeypatch.setattr(row_memory, "free_memory", free)
    own = row_memory_of([50, 7, 30], RowNeeds(column=2, row=0, fixed=0))
    assert own.leaving(87) == [1] and len(looks) == 1
    # To spare are now 2 * (64 + 7) - 1 = 141 bytes, or 70 columns.
    assert own.leaving(80 + 35) == [] and len(looks) == 1
    own.leaving(80 + 36)
    assert len(looks) == 2
    monkeypatch.setattr(row_memory, "free_memory", lambda device: 0)
    assert row_memory_of([50, 7, 30], RowNeeds(2, 0, 0)).leaving(87) == [1, 2], "the last one stays"


def test_parked_rows_leave_before_rows_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    parked = ParkedRows()
    sizes = [70, 50, 40]  # bytes of the rows that are parked, the oldest first
    monkeypatch.setattr(parked, "drop_oldest", lambda: sizes.pop(0) if sizes else 0)
    monkeypatch.setattr(row_memory, "free_memory", lambda device: 3 * 2 * 64 - 100)
    own = row_memory_of([50, 7, 30], RowNeeds(column=2, row=0, fixed=0))
    own.parked = parked
    assert own.leaving(87) == [] and sizes == [40]
    # A new row of 6 grows by 64, and those of 50, 7 and 30 by as many.
    monkeypatch.setattr(row_memory, "free_memory", lambda device: 3 * 2 * 64 + 2 * (6 + 64) - 40)
    assert own.fitting([Request(0, torch.ones(6).long(), 500, 0)]) == 1 and sizes == []


def test_where_memory_is_taken_at_once_fewer_rows_are_in_flight(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    column, row = 2 * 2 * 2 * 16 * 8, 3 * 6 * 64 * 4  # bytes, as in `test_what_a_row_needs`
    fixed = 16 * 8 * (9 + 24) * 64 * 8  # 8 prompts of 9 tokens and 24 new ones
    capacities = []

    def watched(capacity: int, *options: Any, **more: Any) -> Rows:
        capacities.append(capacity)
        return Rows(capacity, *options, **more)

    plain = outputs(generate(tiny, PROMPTS))
    monkeypatch.setattr(row_memory, "takes_memory_late", lambda device: False)
    monkeypatch.setattr(one_call, "Rows", watched)
    monkeypatch.setattr(row_memory, "free_for_cache", lambda *_: fixed + 3 * ((9 + 24 + 5) * column + row))
    for config in ({}, {"max_batch_size": 5}):
        assert outputs(generate(tiny, PROMPTS, config={"draft_length": 5} | config)) == plain
    assert capacities == [3, 5], "who names a number gets it"


def test_rows_of_a_cache_that_is_taken_at_once() -> None:
    needs = RowNeeds(column=10, row=100, fixed=1000)
    assert [needs.rows_that_fit(20, free) for free in (0, 1000 + 599, 1000 + 600, 1000 + 900)] == [1, 1, 2, 3]


def test_what_a_row_needs(tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM) -> None:
    """2 layers x K and V x 2 heads x 16 in float64, 64 tokens, hidden size 64."""
    needs = RowNeeds.of(tiny, [], verified=6, prefilled=10)
    assert needs == RowNeeds(column=2 * 2 * 2 * 16 * 8, row=3 * 6 * 64 * 4, fixed=16 * 10 * 64 * 8)


def test_what_attention_of_prompts_needs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's work space; or masks, as many bytes as a prompt takes for them."""
    model = tiny_llama(num_hidden_layers=1, max_position_embeddings=512)
    network = make_shadow(model)
    taken = 0

    class Squares(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            nonlocal taken
            result = func(*args, **(kwargs or {}))
            is_new = isinstance(result, torch.Tensor) and not any(result is each for each in args)
            taken += result.nbytes if is_new and result.numel() >= 320 * 320 and result.shape[-1] == 320 else 0
            return result

    positions = torch.arange(320)[None]
    with torch.no_grad(), Squares():
        EagerRunner(network, RaggedCache.for_network(network, 1, 320)).prefill(positions % 64, positions, 320)
    assert taken == row_memory.mask_bytes(model, torch.float64, 320, 320) == 320**2 * (1 + (1 + 2) * 8)
    of_many = [row_memory.mask_bytes(model, torch.float64, 8192, columns) for columns in (32_768, 9)]
    assert of_many == [2048 * 32_768 * 25, 8192 * 9 * 25], "a piece of a long row, or many short rows"
    before = RowNeeds.of(model, [], verified=6, prefilled=10, columns=99)
    monkeypatch.setattr(row_memory, "reads_spans", lambda network: True)
    assert RowNeeds.of(model, [], verified=6, prefilled=10, columns=99).fixed == before.fixed + row_memory.WORK_SPACE


def test_requests_that_are_put_back_come_first() -> None:
    requests = [Request(index, torch.ones(1).long(), 5, 0) for index in range(4)]
    queue = RequestQueue(requests)
    taken = queue.take(3, 0)
    queue.put_back(taken[1:])
    assert queue.waiting == 3 and queue.take(2, 1) == taken[1:] and queue.take(9, 1) == requests[3:]
