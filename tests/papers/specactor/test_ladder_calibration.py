"""The draft ladder is profiled by rounds of the engine, and found again."""

import copy
import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig, release
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.rows import Rows
from spec_trl.generation.planner.control import Chain
from spec_trl.papers.efficient_rollout.calibration import RoundBench
from spec_trl.papers.specactor import ladder_calibration
from spec_trl.papers.specactor.ladder import Ladder
from spec_trl.papers.specactor.ladder_calibration import build_ladder, find_ladder
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from tests.conftest import tiny_llama


CONFIG = SpeculativeConfig(sd_toggle="roofline", draft_kernel="reference")
LENGTHS = [2, 4, 8]


def quick(model: LlamaForCausalLM, drafters: Sequence[Drafter], **changes: Any) -> Ladder:
    arguments = dict(batches=(1, 3), draft_lengths=(1, 2, 3), rounds=1, progress=False)
    return build_ladder(model, drafters, config=CONFIG, **(arguments | changes))


def test_every_cell_is_timed(tiny: LlamaForCausalLM) -> None:
    small = SmallModelDrafter(tiny_llama(seed=1, num_hidden_layers=1), tiny)
    ladder = quick(tiny, [SelfDrafter(tiny, kernel="reference"), NgramDrafter(2), small])
    cells = {(rung.method, rung.batch, rung.draft_length) for rung in ladder.rungs}
    assert cells == set(itertools.product(("self", "ngram", "model"), (1, 3), (1, 2, 3)))


def test_a_slow_drafter_shows_and_the_plain_rounds_next_to_it_do_not(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = NgramDrafter.propose
    monkeypatch.setattr(NgramDrafter, "propose", lambda *args: time.sleep(0.2) or propose(*args))
    for rung in quick(tiny, [NgramDrafter(2)], batches=(1,)).rungs:
        assert rung.seconds >= 0.2 > rung.plain_seconds


def clock(monkeypatch: pytest.MonkeyPatch, steps: Iterable[float]) -> list[int]:
    """Rounds do nothing but move the clock on, by a step each; returns the γ of all rounds, as they come."""
    now, steps, done = [0.0], iter(steps), list[int]()

    def round_(bench: RoundBench, plan: Sequence[Chain]) -> float:
        step = next(steps)
        now[0] += step
        done.append(plan[0].draft_length if plan else 0)
        return step

    monkeypatch.setattr(ladder_calibration.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(RoundBench, "round", round_)
    return done


STEPS: dict[str, tuple[Iterable[float], int]] = {
    "quiet": (itertools.repeat(1.0), 3),
    "short": (itertools.repeat(1e-3), 7),
    "busy": (map(Random(0).expovariate, itertools.repeat(1.0)), 7),
    "other work begins": ([1.0] * 9 + [3.0] * 100, 3),  # after the second timed autoregressive round
}


@pytest.mark.parametrize("work", STEPS)
def test_times_that_agree_end_it(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    steps, rounds = STEPS[work]
    done = clock(monkeypatch, steps)
    rungs = quick(tiny, [NgramDrafter(2)], batches=(1,), rounds=7, budget_seconds=1e300).rungs
    assert done.count(0) == 1 + rounds  # and a first one, which does not count
    assert work == "busy" or [rung.seconds / rung.plain_seconds for rung in rungs] == [1.0] * 3


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.0, 1.0), (1.0, 5.0), (0.5, 1.9375)])
def test_tokens_are_marked_with_the_given_probability(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, acceptance: float, tokens: float
) -> None:
    """Whatever the target and the drafter say: the drafter is another model."""
    committed, drafting, commit, round_ = list[float](), [False], Rows.commit, RoundBench.round

    def watched_round(bench: RoundBench, plan: Sequence[Chain]) -> float:
        drafting[0] = bool(plan)
        return round_(bench, plan)

    def watched_commit(rows: Rows, lengths: Any, logprobs: Any) -> None:
        if drafting[0]:
            committed.append((lengths - rows.host_lengths).sum() / 32)
        commit(rows, lengths, logprobs)

    monkeypatch.setattr(RoundBench, "round", watched_round)
    monkeypatch.setattr(Rows, "commit", watched_commit)
    monkeypatch.setattr(ladder_calibration, "ACCEPTANCE", acceptance)
    drafter = SmallModelDrafter(tiny_llama(seed=5), tiny)
    quick(tiny, [drafter], batches=(32,), draft_lengths=(4,), rounds=5)
    assert sum(committed) / len(committed) == pytest.approx(tokens, abs=0.4 * acceptance * (1 - acceptance) * 4)


def test_profiling_leaves_no_trace(tiny: LlamaForCausalLM) -> None:
    history, assistant = HistoryDrafter(1000), tiny_llama(seed=1, num_hidden_layers=1)
    how = TTSOptions(learning_rate=1e-2, scope="run", stride=1)
    learner = DistilledDrafter(SmallModelDrafter(assistant, tiny), how)
    before = copy.deepcopy(assistant.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    quick(tiny, [history, learner], batches=(2,))
    assert torch.equal(torch.rand(3), expected)
    assert len(history.history) == 0 and learner.state_dict() == {}
    assert all(torch.equal(weight, before[name]) for name, weight in assistant.state_dict().items())


def test_short_contexts_and_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_calibration, "STABLE", 1e9)  # a quiet machine
    model = tiny_llama(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    drafter = NgramDrafter(2)
    ladder = quick(model, [drafter], draft_lengths=[16, 32, 64])
    lengths = ladder.draft_lengths("ngram", 1)
    assert lengths and lengths == ladder.draft_lengths("ngram", 3) and max(lengths) < 64
    drafter.max_rows = 2
    ladder = quick(model, [drafter], rounds=50, draft_lengths=(8,))
    assert ladder.batches == (1, 2) and ladder.draft_lengths("ngram", 1) == (8,)
    assert quick(model, [drafter], batches=(4, 8)).batches == (2,)


def test_drafters_that_fail_are_named(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "propose", lambda *_: 1 / 0)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="failed while it was timed: ZeroDivisionError"):
        quick(tiny, [NgramDrafter(2)])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Rounds take no time; the list has batches and γ of the ladders that were built."""
    asked: list[tuple[list[int], list[int]]] = []
    build = ladder_calibration.build_ladder

    def watch(model: Any, drafters: Any, batches: list[int], draft_lengths: Sequence[int], **options: Any) -> Ladder:
        asked.append((list(batches), list(draft_lengths)))
        return build(model, drafters, batches, draft_lengths, rounds=1, **options)

    monkeypatch.setattr(ladder_calibration, "build_ladder", watch)
    clock(monkeypatch, itertools.repeat(1.0))
    return asked


def test_a_ladder_is_found_again(
    tiny: LlamaForCausalLM, built: list[Any], cache: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(ladder_calibration, "QUIET", 0.0)
    drafters = [SelfDrafter(tiny, kernel="reference"), NgramDrafter(2)]
    first = find_ladder(tiny, drafters, CONFIG, 16, LENGTHS)
    assert f"profiling the drafters of LlamaForCausalLM (once; kept in {cache})" in capsys.readouterr().err
    assert built == [([1, 4, 16], [2, 4, 8])]
    assert find_ladder(tiny, drafters, CONFIG, 7, LENGTHS) is first
    release(tiny)  # as a new process would
    (path,) = cache.glob("*.ladder.json")
    assert find_ladder(tiny, drafters, CONFIG, 32, LENGTHS) == first == Ladder.load(path)
    assert len(built) == 1
    find_ladder(tiny, drafters, CONFIG, 33, LENGTHS)  # more than twice as many rows
    assert built[1:] == [([1, 4, 16, 33], [2, 4, 8])]
    find_ladder(tiny, drafters[1:], CONFIG, 4, LENGTHS)  # another set of drafters: a file of its own
    assert len(built) == 3 and len(list(cache.glob("*.ladder.json"))) == 2
    find_ladder(tiny, drafters, CONFIG, 33, [5, 7])
    assert built[3][1] == [5, 7]
    release(tiny)  # as a new process would
    find_ladder(tiny_llama(seed=9), drafters, CONFIG, 33, LENGTHS)  # other weights are no matter
    assert len(built) == 4
    find_ladder(tiny_llama(hidden_size=32), drafters, CONFIG, 33, LENGTHS)
    assert len(built) == 5


def test_a_ladder_lies_next_to_a_named_profile(tiny: LlamaForCausalLM, built: list[Any], tmp_path: Path) -> None:
    config = SpeculativeConfig(sd_toggle="roofline", efficient_rollout=dict(profile=str(tmp_path / "mine.json")))
    find_ladder(tiny, [NgramDrafter(2)], config, 31, LENGTHS)
    assert built == [([1, 4, 31], LENGTHS)]  # a batch close to the largest is left out
    path = tmp_path / "mine.ladder.json"
    assert Ladder.load(path).methods == ("ngram",)
    release(tiny)  # as a new process would
    path.write_text("{")
    with pytest.warns(UserWarning, match="is left aside, and the drafters are profiled again"):
        find_ladder(tiny, [NgramDrafter(2)], config, 31, LENGTHS)
    assert len(built) == 2 and Ladder.load(path)
