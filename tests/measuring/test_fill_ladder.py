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

from spec_trl import SpeculativeConfig
from spec_trl.generation import kept
from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.verification import Proposal
from spec_trl.measuring import fill_ladder
from spec_trl.measuring.fill_ladder import build_ladder, find_ladder
from spec_trl.scheduling.ladder import Ladder, Rung
from tests.conftest import tiny_llama


CONFIG = SpeculativeConfig(sd_toggle="always", draft_kernel="reference", draft_length=4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spec_trl" / "profiles"


def quick(model: LlamaForCausalLM, drafters: Sequence[Drafter], **changes: Any) -> Ladder:
    arguments = dict(batches=(1, 3), draft_lengths=(1, 3), acceptances=(0.2, 0.8), rounds=1, progress=False)
    return build_ladder(model, drafters, config=CONFIG, **(arguments | changes))


def members(model: LlamaForCausalLM) -> list[Drafter]:
    assistant = tiny_llama(seed=1, num_hidden_layers=1)
    return [SelfDrafter(model, kernel="reference"), NgramDrafter(2), SmallModelDrafter(assistant, model)]


def test_every_cell_is_timed(tiny: LlamaForCausalLM) -> None:
    ladder = quick(tiny, members(tiny))
    cells = {(rung.method, rung.batch, rung.draft_length, rung.acceptance) for rung in ladder.rungs}
    assert cells == {
        (name, batch, gamma, p)
        for name in ("self", "ngram", "model")
        for batch in (1, 3)
        for gamma in (1, 3)
        for p in (0.2, 0.8)
    }


def test_a_slow_drafter_shows_and_the_plain_rounds_beside_it_do_not(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = NgramDrafter.propose

    def slow(*args: Any) -> Proposal:
        time.sleep(0.2)
        return propose(*args)

    monkeypatch.setattr(NgramDrafter, "propose", slow)
    for rung in quick(tiny, [NgramDrafter(2)], batches=(1,)).rungs:
        assert rung.seconds >= 0.2 > rung.plain_seconds


def clock(monkeypatch: pytest.MonkeyPatch, steps: Iterable[float]) -> list[object]:
    """Rounds do nothing but move the clock on, by a step each; returns the cells of all rounds, as they come."""
    now, steps, done = [0.0], iter(steps), []

    def round_(bench: fill_ladder._Bench, cell: object) -> None:
        now[0] += next(steps)
        done.append(cell)

    monkeypatch.setattr(fill_ladder.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(fill_ladder._Bench, "_round", round_)
    return done


QUIET, SHORT = itertools.repeat(1.0), itertools.repeat(1e-3)


@pytest.mark.parametrize(
    ("steps", "rounds"),
    [(QUIET, 3), (SHORT, 7), (map(Random(0).expovariate, itertools.repeat(1.0)), 7)],
    ids=["quiet", "short", "busy"],
)
def test_times_that_agree_end_it(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, steps: Iterable[float], rounds: int
) -> None:
    done = clock(monkeypatch, steps)
    quick(tiny, [NgramDrafter(2)], batches=(1,), rounds=7, budget_seconds=1e300)
    assert done.count(None) == 1 + rounds  # and a first one, which does not count


def test_other_work_that_begins_meanwhile_leaves_the_speedups_alone(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds take 1 s, and 3 s once the fourth visit to the 5 cells has begun, but for one that takes a minute."""
    clock(monkeypatch, [1.0] * 20 + [3.0] * 7 + [60.0] + [3.0] * 12)
    rungs = quick(tiny, [NgramDrafter(2)], batches=(1,), rounds=7, budget_seconds=1e300).rungs
    assert [rung.seconds / rung.plain_seconds for rung in rungs] == [1.0] * 4


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.0, 1.0), (1.0, 5.0), (0.5, 1.9375)])
def test_tokens_are_marked_with_the_given_probability(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, acceptance: float, tokens: float
) -> None:
    """Whatever the target and the drafter say: the drafter is another model."""
    committed, commit = [], fill_ladder._MarkedRollout._commit

    def watch(self: Any, outcome: Any) -> Any:
        finished, count = commit(self, outcome)
        if outcome.width:
            committed.append(count / 32)
        return finished, count

    monkeypatch.setattr(fill_ladder._MarkedRollout, "_commit", watch)
    drafter = SmallModelDrafter(tiny_llama(seed=5), tiny)
    quick(tiny, [drafter], batches=(32,), draft_lengths=(4,), acceptances=(acceptance,), rounds=5)
    assert sum(committed) / len(committed) == pytest.approx(tokens, abs=0.4 * acceptance * (1 - acceptance) * 4)


def test_profiling_leaves_no_trace(tiny: LlamaForCausalLM) -> None:
    history, assistant = HistoryDrafter(1000), tiny_llama(seed=1, num_hidden_layers=1)
    learner = DistilledDrafter(SmallModelDrafter(assistant, tiny), Distillation(1e-2, scope="run"))
    before = copy.deepcopy(assistant.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    quick(tiny, [history, learner], batches=(2,))
    assert torch.equal(torch.rand(3), expected)
    assert len(history.history) == 0 and learner.state_dict() == {}
    assert all(torch.equal(weight, before[name]) for name, weight in assistant.state_dict().items())


def test_short_contexts_and_few_rows() -> None:
    model = tiny_llama(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    drafter = NgramDrafter(2)
    drafter.max_rows = 2
    ladder = quick(model, [drafter], rounds=50, draft_lengths=(8,))
    assert ladder.batches == (1, 2) and ladder.draft_lengths("ngram", 1) == (8,)
    assert quick(model, [drafter], batches=(4, 8)).batches == (2,)


def test_a_drafter_that_fails_is_named(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "propose", lambda *_: 1 / 0)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="failed while it was timed: ZeroDivisionError"):
        quick(tiny, [NgramDrafter(2)])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Nothing is timed; the list has batches and γ of what was to be."""
    asked: list[tuple[list[int], list[int]]] = []

    def build(
        model: Any, drafters: Any, batches: Any, draft_lengths: Any, config: SpeculativeConfig, **_: Any
    ) -> Ladder:
        asked.append((list(batches), list(draft_lengths)))
        rungs = [Rung(d.strategy, b, g, 0.5, 1.0, 1.0) for d in drafters for b in batches for g in draft_lengths]
        key = fill_ladder.profile_key(model, config)
        return Ladder(tuple(rungs), fill_ladder._fingerprint(key, drafters, draft_lengths))

    monkeypatch.setattr(fill_ladder, "build_ladder", build)
    return asked


def forget() -> None:
    kept._kept.clear()  # as a new process would


def test_a_ladder_is_found_again(tiny: LlamaForCausalLM, built: list[Any], cache: Path) -> None:
    drafters = [SelfDrafter(tiny, kernel="reference"), NgramDrafter(2)]
    first = find_ladder(tiny, drafters, CONFIG, 16)
    assert built == [([1, 4, 16], [2, 4, 8])]
    assert find_ladder(tiny, drafters, CONFIG, 7) is first
    forget()
    (path,) = cache.glob("*.ladder.json")
    assert find_ladder(tiny, drafters, CONFIG, 32) == first == Ladder.load(path)
    assert len(built) == 1
    find_ladder(tiny, drafters, CONFIG, 33)  # more than twice as many rows
    assert built[1:] == [([1, 4, 16, 33], [2, 4, 8])]
    find_ladder(tiny, drafters[1:], CONFIG, 4)  # another set of drafters: a file of its own
    assert len(built) == 3 and len(list(cache.glob("*.ladder.json"))) == 2
    find_ladder(tiny, drafters, CONFIG, 33, [5, 7])
    assert built[3][1] == [5, 7]
    forget()
    find_ladder(tiny_llama(seed=9), drafters, CONFIG, 33)  # other weights are no matter
    assert len(built) == 4
    find_ladder(tiny_llama(hidden_size=32), drafters, CONFIG, 33)
    assert len(built) == 5


def test_a_batch_close_to_the_largest_is_left_out(tiny: LlamaForCausalLM, built: list[Any]) -> None:
    find_ladder(tiny, [NgramDrafter(2)], CONFIG, 31)
    assert built == [([1, 4, 31], [2, 4, 8])]


def test_a_ladder_lies_beside_a_named_profile(tiny: LlamaForCausalLM, built: list[Any], tmp_path: Path) -> None:
    config = SpeculativeConfig(sd_toggle="roofline", roofline_profile=str(tmp_path / "mine.json"))
    find_ladder(tiny, [NgramDrafter(2)], config, 1)
    assert Ladder.load(tmp_path / "mine.ladder.json").methods == ("ngram",)


def test_a_broken_file_is_left_aside(tiny: LlamaForCausalLM, built: list[Any], cache: Path) -> None:
    find_ladder(tiny, [NgramDrafter(2)], CONFIG, 1)
    forget()
    (path,) = cache.glob("*.ladder.json")
    path.write_text("{")
    with pytest.warns(UserWarning, match="is left aside, and the drafters are profiled again"):
        find_ladder(tiny, [NgramDrafter(2)], CONFIG, 1)
    assert len(built) == 2 and Ladder.load(path)


def test_names_tell_drafters_apart(tiny: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"drafter has the strategies \['ngram', 'ngram'\]"):
        find_ladder(tiny, [NgramDrafter(2), NgramDrafter(3)], CONFIG, 1)


def test_where_the_longest_draft_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_trl.measuring.fill_ladder.STABLE", 1e9)  # a quiet machine
    model = tiny_llama(max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    ladder = build_ladder(model, [NgramDrafter(2)], [1, 4], SpeculativeConfig(draft_length=32).ladder_draft_lengths())
    lengths = ladder.draft_lengths("ngram", 1)
    assert lengths and lengths == ladder.draft_lengths("ngram", 4) and max(lengths) < 64


def test_the_bar_says_why_and_that_it_happens_once(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    monkeypatch.setattr(fill_ladder, "QUIET", 0.0)
    monkeypatch.setattr(fill_ladder._Bench, "measure", lambda self, seconds: [])
    with pytest.raises(ValueError, match="rung"):  # nothing was measured
        fill_ladder.find_ladder(tiny, [NgramDrafter(2)], SpeculativeConfig(sd_toggle="always"), 1)
    folder = fill_ladder.cache_directory()
    assert f"profiling the drafters of LlamaForCausalLM (once; kept in {folder})" in capsys.readouterr().err
