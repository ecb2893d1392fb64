"""Ranks that share a pool decode what one rank decodes, whoever decodes what; ranks are threads here."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeOutput
from spec_trl.distributed import pool as pool_module
from spec_trl.distributed.moved_rows import Sending
from spec_trl.distributed.pool import SharedPool
from spec_trl.distributed.shared_work import MoveCosts, longest_first
from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.rollout import RequestQueue
from spec_trl.generation.engine.rows import Request
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from tests.conftest import TRANSFORMERS, WIDE, add_noise
from tests.distributed import test_moved_rows as moved_rows
from tests.distributed.ranks import Patient, links, run_ranks, unfair
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.tiny_families import make


ENDS: dict[str, Any] = {"eos_token_id": [5, 6], "max_new_tokens": 100}  # lengths with a long tail, 32 on average


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random drafter that reads the target's hidden states."""
    folder = tmp_path_factory.mktemp("eagle3")
    eagle3.make_folder(folder, eagle3.safeai(vocab_size=64, draft_vocab_size=64))
    return str(folder)


def prompts(count: int) -> Prompts:
    """Two copies of each prompt."""
    rows = random_rows([4 + 3 * (index % 4) for index in range(count // 2)])
    return pad_left([row for row in rows for _ in range(2)])


def decode(
    ranks: int,
    order: Sequence[int | list[int]],
    rows: int,
    call: Callable[[int, Callable[[list[Request]], SharedPool]], SpeculativeOutput],
    kind: type[SharedPool] = SharedPool,
) -> tuple[list[list[int]], list[SharedPool], list[SpeculativeOutput]]:
    """Completions of all ranks, each from the one rank that has it, and the ranks' pools and outputs. `call` generates
    on a rank, with a queue of `kind`; requests are taken one by one, or as `order` has them together."""
    ends, pools = links(ranks), {}
    stacks = [[own] if isinstance(own, int) else own for own in order]

    def job(rank: int) -> SpeculativeOutput:
        def make(requests: list[Request]) -> SharedPool:
            pools[rank] = kind(requests, stacks, rows, ends[rank], None)
            pools[rank].link = ends[rank]
            return pools[rank]

        return call(rank, make)

    found = run_ranks(ranks, job)
    texts = [[text for text in each if text] for each in zip(*map(outputs, found), strict=True)]
    assert all(len(each) == 1 for each in texts), "a request has two completions, or none"
    return [each[0] for each in texts], [pools[rank] for rank in range(ranks)], found


@pytest.mark.parametrize(("ranks", "rows"), [(2, 4), (3, 3), (2, 1)])
def test_copies_of_a_prompt_stay_on_one_rank(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, ranks: int, rows: int
) -> None:
    monkeypatch.setattr(pool_module, "rows_to_give", lambda *_: 0)
    given, config = prompts(12), {"max_batch_size": rows}
    order = longest_first([str(row) for row in given["input_ids"].tolist()], [0.0] * 12, rows=2)
    texts, _, found = decode(
        ranks, order, rows, lambda _, make: generate(tiny, given, "none", config, make_queue=make, **ENDS)
    )
    assert texts == outputs(generate(tiny, given, **ENDS))
    for one, other in order:
        assert any(outputs(each)[one] and outputs(each)[other] for each in found)


@pytest.mark.parametrize(
    ("ranks", "rows", "strategy"),
    [(2, 3, "none"), (4, 2, "none"), (4, 2, "self"), (3, 16, "self"), (2, 3, "ngram"), (2, 3, "history")],
)
def test_ranks_decode_what_one_decodes(tiny: LlamaForCausalLM, ranks: int, rows: int, strategy: str) -> None:
    given = prompts(16)
    alone = outputs(generate(tiny, given, **ENDS))
    config = {"max_batch_size": rows}
    texts, pools, found = decode(
        ranks, range(16), rows, lambda _, make: generate(tiny, given, strategy, config, make_queue=make, **ENDS)
    )
    assert texts == alone
    assert sum(len(each.statistics.ended_in) for each in found) == 16
    assert sum(each.statistics.tokens for each in found) == sum(map(len, alone))
    assert all(pool.waiting == 0 for pool in pools)


def test_a_rank_may_decode_nothing(tiny: LlamaForCausalLM) -> None:
    given = prompts(2)
    texts, _, found = decode(3, [[0, 1]], 4, lambda _, make: generate(tiny, given, "self", make_queue=make, **ENDS))
    assert texts == outputs(generate(tiny, given, **ENDS))
    assert sorted(each.statistics.rounds > 0 for each in found) == [False, False, True]


@pytest.mark.parametrize(
    ("strategy", "head_share"),
    [("none", 0.0), ("none", 1.0), ("self", 0.37), ("model", 0.37), ("eagle3", 0.37), ("history", 0.37),
     ("self, decoupled", 0.37), ("ngram, decoupled", 0.0)],
)  # fmt: skip
def test_moved_rows_go_on_where_they_were(
    tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM, eagle: str, strategy: str, head_share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A rank that has nothing left gets half of the rows of the one that has most, as often as it asks."""
    monkeypatch.setattr(pool_module, "rows_to_give", lambda lengths, *_: len(lengths) // 2)
    monkeypatch.setattr(pool_module, "POLL_SHARE", 1e9)
    monkeypatch.setattr(MoveCosts, "head_share", property(lambda _: head_share))
    given, config = prompts(8), {"max_batch_size": 4}
    strategy, _, is_decoupled = strategy.partition(", ")
    config |= {"specactor": {"decoupled_execution": "always"}} if is_decoupled else {}
    reference = generate(tiny, given, **ENDS)
    alone = outputs(reference)
    assistants = {"model": tiny_assistant, "eagle3": eagle}
    more = {"assistant_model": assistants[strategy]} if strategy in assistants else {}
    texts, pools, found = decode(
        2, unfair(alone), 4,
        lambda _, make: generate(tiny, given, strategy, config, make_queue=make, **ENDS, **more), Patient,
    )  # fmt: skip
    assert texts == alone
    assert pools[1].taken_over > 0
    assert (pools[1].send_seconds is None) == (head_share == 1.0 or strategy == "eagle3")
    assert pools[1].idle_seconds > 0
    check_logprobs(found, reference)


@pytest.mark.skipif(TRANSFORMERS < (5, 21), reason="such families are refused")
@pytest.mark.parametrize("strategy", ["none", "self"])
def test_rows_with_states_are_read_again_where_they_go(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state cannot be cut at a column. Chunks of a text round in float32, whatever the model's dtype."""
    monkeypatch.setattr(pool_module, "rows_to_give", lambda lengths, *_: len(lengths) // 2)
    monkeypatch.setattr(pool_module, "POLL_SHARE", 1e9)
    monkeypatch.setattr(MoveCosts, "head_share", property(lambda _: 0.37))
    model, given, config = make("qwen3_5_text"), prompts(8), {"max_batch_size": 4, "draft_length": 3}
    alone = outputs(generate(model, given, **ENDS))
    texts, pools, found = decode(
        2, unfair(alone), 4,
        lambda _, queue: generate(model, given, strategy, config, make_queue=queue, **ENDS), Patient,
    )  # fmt: skip
    assert texts == alone and pools[1].taken_over > 0 and pools[1].send_seconds is None
    assert strategy == "none" or sum(each.statistics.total.accepted for each in found) > 0


def check_logprobs(found: Sequence[SpeculativeOutput], reference: SpeculativeOutput) -> None:
    """Each row has those of `reference`, on the one rank that has it: bit for bit, but in float64."""
    exact = reference.statistics.exact
    assert all(each.statistics.exact == exact for each in found)
    for row, count in enumerate(reference.lengths.tolist()):
        (mine,) = [each for each in found if each.lengths[row]]
        assert mine.logprobs[row, :count].allclose(reference.logprobs[row, :count], 0, 0 if exact is True else 1e-6)


@pytest.mark.parametrize(
    ("strategy", "head_share"),
    [("none", 0.37), ("self", 1.0), ("eagle3", 0.37), ("self, decoupled", 0.37)],
)
def test_no_bit_of_moved_rows_differs(
    narrow: LlamaForCausalLM, tmp_path: Path, strategy: str, head_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their heads are computed again: prompts as prompts, and what steps had generated as steps do."""
    eagle3.make_folder(tmp_path, eagle3.safeai(vocab_size=64, draft_vocab_size=64, **WIDE))
    assistant = add_noise(copy.deepcopy(narrow))
    test_moved_rows_go_on_where_they_were(narrow, assistant, str(tmp_path), strategy, head_share, monkeypatch)
    assert generate(narrow, prompts(2)).statistics.exact is True


def test_a_copy_that_drafts_ahead_reads_the_columns_of_moved_rows(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without quantization is always right, on the rank that begins a row and on the one that goes on with it."""
    monkeypatch.setattr(pool_module, "rows_to_give", lambda lengths, *_: len(lengths) // 2)
    monkeypatch.setattr(pool_module, "POLL_SHARE", 1e9)
    given, config = prompts(8), {"max_batch_size": 4}
    alone = outputs(generate(tiny, given, **ENDS))
    drafters = [
        DecoupledDrafter(DraftThread(NetworkDrafter(make_shadow(tiny), shares_target_cache=True))) for _ in range(2)
    ]
    texts, pools, _ = decode(
        2, unfair(alone), 4,
        lambda rank, make: generate(tiny, given, config=config, drafter=drafters[rank], make_queue=make, **ENDS),
        Patient,
    )  # fmt: skip
    assert texts == alone and pools[1].taken_over > 0
    for drafter in drafters:
        assert drafter.drafted > 0 == drafter.dropped


def test_what_another_rank_ended_first_is_no_completion(tiny: LlamaForCausalLM) -> None:
    """Not in the curve of completions either, whose shares the report draws."""

    class Lost(RequestQueue):
        def keeps(self, index: int) -> bool:
            return False

    found = generate(tiny, prompts(2), make_queue=Lost, **ENDS)
    assert outputs(found) == [[], []]
    assert found.statistics.completion_curve == []


def test_a_rank_that_gets_rows_waits_no_more() -> None:
    """What other ranks say of one that dies while it computes their head."""
    ends, requests = links(2), moved_rows.requests([3])
    waiting = SharedPool(requests, [[0]], 1, ends[1], None)
    with ThreadPoolExecutor(1) as thread:
        SharedPool(requests, [[0]], 1, ends[0], None)
        took = thread.submit(waiting.take, 1, 0)
        ends[0].await_note("asker/1")
        Sending(requests, ends[0], 1, "work/1")
        assert len(took.result()) == 1
    assert not ends[0].read([ends[0].rows_of(1)])[0].startswith("-1 ")


def test_a_slow_answer_silences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not write for a whole timeout is taken for dead, and one that does not look gives no rows."""
    now = 0.0
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(perf_counter=lambda: now))
    end = links(2)[0]
    pool = SharedPool(moved_rows.requests([1]), [[0]], 1, end, None)
    rollout = SimpleNamespace(rows=SimpleNamespace(indices=[0]))
    count = end.count

    def slowly(counter: str) -> int:
        nonlocal now
        now += end.timeout / 4
        return count(counter)

    monkeypatch.setattr(end, "count", slowly)
    pool.after_round(rollout)
    told = end.read([end.rows_of(0)])
    now += end.timeout / 4
    pool.after_round(rollout)
    assert end.read([end.rows_of(0)]) != told
