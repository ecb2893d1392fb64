"""``spec-trl bench``: what it measures, how it judges, and what it recommends, on tiny models."""

import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.generation import stopping_criteria

from examples.demo.task import build_tokenizer
from spec_trl import SpecGRPOConfig, SpeculativeConfig
from spec_trl.cli import bench as cli_bench
from spec_trl.cli import gains, visits
from spec_trl.cli.bench import EXACT, choose, config_to_paste, recommend
from spec_trl.cli.gains import GENERATE, Call, Gain, Identity, Way, Work, compare
from spec_trl.cli.main import main
from spec_trl.cli.visits import NotEnoughTime, measure
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.engine.statistics import SpeculationStatistics
from spec_trl.generation.measuring import profile_key
from spec_trl.user_cache import cache_directory
from tests.cli.sample_run import make_profile


WORK = Work([[1, 2, 3]], 80, 1.0)


def bench(model: Path, *options: str) -> int:
    usual = ["--length", "6", "--seconds", "60", "--draft-length", "2", "--dtype", "float64"]
    return main(["bench", str(model), *usual, *options])


def test_all_ways_are_measured_and_compared(
    model: Path, tmp_path: Path, tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(visits, "MOST_VISITS", 2)
    tiny_assistant.save_pretrained(tmp_path / "small")
    key = profile_key(tiny, SpeculativeConfig())
    replace(make_profile(), key=key).save(cache_directory("profiles") / key.file_name)
    assert bench(model, "--batch", "3,1", "--assistant", f"model={tmp_path / 'small'}") == 0
    printed = capsys.readouterr().out
    assert "float64" in printed and "torch 2" in printed and "random prompts" in printed
    assert "not possible" not in printed
    for batch in (1, 3):
        head = f"batch {batch}, up to 6 tokens per row, median of 1 call each. Thin: too little to compare:"
        lines = printed.partition(head)[2].splitlines()[2:8]
        names = [line.strip().rpartition("  ")[0].split("  ")[0] for line in lines]
        assert {*names[:2]} == {"generate", "none"} and {*names[2:4]} == {"model, γ 2", "auto"}
        assert len({*names[4:]} & {"self, γ 2", "ngram, γ 2", "history, γ 2"}) == 2
        for name, line in zip(names, lines, strict=True):
            rows = f"{2 * batch} of {2 * batch}"  # two visits, float64: no row may differ
            assert line.endswith(rows) == (name not in ("generate", "none"))
            predicted = line.strip().removeprefix(name).split()[5]
            assert (predicted != "-") == (name not in ("generate", "none", "auto"))
    assert printed.count("slower in a probe, or not tried for want of time: ") == 1  # the smallest batch chooses
    assert "no recommendation, too little was measured: it needs 3 calls each of at least 32 tokens" in printed


@pytest.mark.parametrize("parts", [[], ["q_proj, float32, 1 row"]])
def test_whether_the_model_is_exact_is_said(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, parts: list[str]
) -> None:
    monkeypatch.setattr(runner_choice, "inexact_parts", lambda *_: parts)
    assert bench(model, "--batch", "1", "--dtype", "float32") == 0
    said = "not exact here (q_proj, float32, 1 row): drafts may change a token at a near-tie" if parts else EXACT
    assert said in capsys.readouterr().out.splitlines()


def test_prompts_of_a_file_greedily(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visits, "MOST_VISITS", 2)
    shutil.copytree(model, tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a3+b8=\nc5=\n")
    assert bench(tmp_path / "model", "--prompts", str(prompts), "--temperature", "0", "--batch", "2") == 0
    printed = capsys.readouterr().out
    assert f"prompts of {prompts}; temperature 0" in printed and "predicted" not in printed
    assert printed.count("4 of 4") == 3


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: Counter[Way] = Counter()

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, eq=False)
class FakeWay(Way):
    """Takes `seconds` for a token, half a second for the prompts, and generates nothing. Its first call compiles for
    `compiles` seconds; later ones take `slower` times as long each time, as if other work came to the machine."""

    seconds: float = 1.0
    compiles: float = 0.0
    slower: float = 1.0

    def __call__(
        self, model: PreTrainedModel, work: Work, seed: int, clock: Callable[[], float], until: float = math.inf
    ) -> Call | None:
        assert isinstance(clock, Clock)
        started, factor = clock.now, self.slower ** clock.calls[self]
        clock.now += 0.5 + (0 if clock.calls[self] else self.compiles)
        clock.calls[self] += 1
        for _ in range(work.new_tokens):
            clock.now += factor * self.seconds
            if clock.now >= until:
                return None
        statistics = SpeculationStatistics(self.strategy, phase_seconds={"prefill": 0.5})
        return Call(clock.now - started, [[seed] * work.new_tokens], statistics)


PROBED = 2 * 1.3 + 2 * 1.3 + 2 * 2.1  # seconds of the probes below: 8 tokens each


@pytest.mark.parametrize(
    ("seconds", "tokens", "turns_of_each"),
    [
        (PROBED + 4 * 14.3, 32, 4),  # the least: a visit that does not count, and three that do
        (PROBED + 4.5 * (1.5 + 0.4 * 40), 40, 4),  # what fits four times and a half
        (10_000.0, 80, 8),  # all that was asked for
    ],
)
def test_as_many_tokens_are_measured_as_the_time_allows(
    seconds: float, tokens: int, turns_of_each: int, tiny: LlamaForCausalLM
) -> None:
    clock, turns = Clock(), []
    ways = [FakeWay(GENERATE, seconds=0.1), FakeWay("none", seconds=0.1), FakeWay("self", 3, seconds=0.2)]
    until = seconds + 0.01
    work, calls = measure(tiny, ways, WORK, 5, until, until, clock, lambda way: turns.append(way.strategy))
    assert work.new_tokens == tokens
    assert [len(made) for made in calls.values()] == [turns_of_each] * 3
    assert turns[:6] == ["none", "none", GENERATE, GENERATE, "self", "self"]
    assert turns[6:12] == [GENERATE, "none", "self", "none", "self", GENERATE]
    assert [call.completions[0][0] for call in calls[ways[0]]] == list(range(5, 5 + turns_of_each))  # a seed per visit
    assert clock.now <= until


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_what_a_comparison_takes_is_said_before_it_is_begun(share: float, tiny: LlamaForCausalLM) -> None:
    """Then so many seconds are enough, also where that is more than the batch's share of the time."""
    ways = [FakeWay(GENERATE, seconds=0.1), FakeWay("none", seconds=0.1), FakeWay("auto", seconds=0.1)]
    for seconds in (6.0, 30.0, 55.0):
        clock = Clock()
        with pytest.raises(NotEnoughTime) as said:
            measure(tiny, ways, WORK, 0, seconds, seconds, clock)
        assert clock.now == pytest.approx(2 * 1.3 + 2 * 1.3) and len(clock.calls) == 2  # the probe of the baselines
        assert said.value.seconds == pytest.approx(clock.now + 4.5 * 3 * (0.5 + 0.1 * 32))
        enough, clock = said.value.seconds + 0.01, Clock()
        work, calls = measure(tiny, ways, WORK, 0, share * enough, enough, clock)
        assert work.new_tokens == 32 and [len(made) for made in calls.values()] == [4] * 3 and clock.now <= enough
    with pytest.raises(NotEnoughTime) as said:
        measure(tiny, ways, WORK, 0, 3.0, 3.0, Clock())
    assert said.value.seconds is None  # not even the probe ended


@pytest.mark.parametrize(("compiles", "slower"), [(0.0, 1.0), (30.0, 1.0), (0.0, 1.2), (30.0, 3.0)])
def test_a_slow_or_busy_machine_stops_in_time(compiles: float, slower: float, tiny: LlamaForCausalLM) -> None:
    for seconds in range(1, 1000, 7):
        clock = Clock()
        ways = [
            FakeWay(strategy, gamma, None, None, 0.5, compiles, slower)
            for strategy, gamma in [(GENERATE, 0), ("none", 0), ("auto", 0), ("self", 3), ("self", 7), ("ngram", 3)]
        ]
        try:
            work, calls = measure(tiny, ways, WORK, 0, seconds, seconds, clock)
        except NotEnoughTime as short:
            assert short.seconds is None or short.seconds > seconds
            calls = {}
        unstoppable = 0.5 + compiles + 0.5 * slower ** max(clock.calls.values())  # reading, compiling, one forward
        assert clock.now <= seconds + unstoppable
        assert len({len(made) for made in calls.values()}) <= 1 and all(map(len, calls.values()))
        assert not calls or {way.strategy for way in calls} > {GENERATE, "none"}
        assert slower > 1 or len(calls) == 0 or len(calls[ways[0]]) > gains.ENOUGH_VISITS
        without_none = {way: made for way, made in calls.items() if way.strategy == GENERATE}
        assert gains.summarise(tiny, WORK, 0, without_none, None) == []


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (10_000.0, ["model, γ 3", "auto", "ngram, γ 3", "self, γ 7"]),  # one that was named, and three more
        (230.0, ["model, γ 3", "auto", "ngram, γ 3"]),
        (160.0, ["model, γ 3", "ngram, γ 3"]),  # "auto" would take too long
        (125.0, ["model, γ 3"]),
    ],
)
def test_a_probe_ranks_the_candidates(seconds: float, expected: list[str], tiny: LlamaForCausalLM) -> None:
    """Each at its faster γ; what the user named and "auto" come first, the slowest and the last are left out."""
    paces = {"auto": {0: 0.4}, "self": {3: 0.5, 7: 0.3}, "ngram": {3: 0.1, 7: 0.2}, "history": {3: 0.6}}
    ways = [FakeWay(GENERATE, seconds=0.1), FakeWay("none", seconds=0.1)]
    ways += [FakeWay(name, gamma, seconds=pace) for name, own in paces.items() for gamma, pace in own.items()]
    ways += [FakeWay("model", 3, None, "small", seconds=0.3), FakeWay("model", 7, None, "small", seconds=0.4)]
    work, calls = measure(tiny, ways, WORK, 0, seconds, seconds, Clock())
    assert [way.name for way in calls] == ["generate", "none", *expected]
    assert work.new_tokens >= 32 and all(len(made) > 3 for made in calls.values())


def test_a_batch_that_does_not_fit_is_left_out_and_nothing_at_all_is_an_error(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of(rows: int, seconds: float | None) -> None:
        def fake(model: PreTrainedModel, ways: Any, work: Work, *arguments: Any, **options: Any) -> Any:
            if len(work.prompts) >= rows:
                raise NotEnoughTime(seconds)
            return measure(model, ways, work, *arguments, **options)

        monkeypatch.setattr(cli_bench, "measure", fake)

    short_of(3, 90.0)
    assert bench(model, "--batch", "3,1") == 0
    printed = capsys.readouterr().out
    assert "batch 3: left out for want of time: it takes about 100 s of its own" in printed
    assert "batch 1, up to 6 tokens per row" in printed
    for seconds, said in ((900.0, "takes about 10[0-9]0 s"), (None, "no time for two calls of 8 tokens")):
        short_of(1, seconds)
        assert bench(model, "--batch", "3,1") == 2
        error = capsys.readouterr().err
        assert re.search(f"--seconds 60 is too short: .*{said}", error) and "at batch 1" in error
        assert re.search("Give --seconds 10[0-9]0 or more" if seconds else "Give several times as much", error)


@pytest.mark.parametrize("strategy", [GENERATE, "none", "self"])
def test_a_call_that_takes_too_long_is_given_up(
    strategy: str, tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=clock))
    way, looked = Way(strategy, 3 if strategy == "self" else 0), []
    work = Work([[1, 2, 3], [4, 5, 6]], 60, 1.0)

    def slow(self: Any, ids: Any, scores: Any, **_: Any) -> Any:
        looked.append(clock.now)
        clock.now += 1.0
        return is_over(self, ids, scores)

    is_over = stopping_criteria.MaxTimeCriteria.__call__
    monkeypatch.setattr(stopping_criteria.MaxTimeCriteria, "__call__", slow)
    assert way(tiny, work, 0, clock, 9.5) is None
    assert looked == list(range(10))
    done = way(tiny, work, 0, clock, math.inf)
    assert done is not None and max(map(len, done.completions)) == 60


def call_of(*rows: list[int], seconds: float = 1.0) -> Call:
    return Call(seconds, list(rows), None)


def test_a_row_that_differs_is_a_near_tie_or_an_error(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work([[1, 2, 3]], 40, 1.0)
    plain = Way("none")(tiny, work, 7, Clock())
    (row,) = plain.completions
    scores = gains.reference_scores(tiny, [1, 2, 3, *row[:5]], 1.0, 7, 0, 5)  # [vocab]
    assert scores.argmax() == row[5]
    second = int(scores.topk(2).indices[1])
    gap = float(scores[row[5]] - scores[second])
    other = call_of([*row[:5], second, *row[6:]])
    assert compare(tiny, work, 7, [plain], [plain], 3) == Identity(1, 1, 0, 0)
    assert compare(tiny, work, 7, [plain], [other], 3) == Identity(1, 0, 0, 1)  # float64 has next to no noise
    assert compare(tiny, work, 7, [plain], [call_of(row[:5])], 3) == Identity(1, 0, 0, 1)  # ended early
    assert compare(tiny, work, 7, [plain], [other], 3, until=0.0) == Identity(1, 0, 0, 0, 1)
    monkeypatch.setattr(gains, "logit_noise", lambda *_: 2 * gap)
    assert compare(tiny, work, 7, [plain], [other], 3) == Identity(1, 0, 1, 0)
    assert compare(tiny, work, 7, [plain], [call_of(row[:5])], 3) == Identity(1, 0, 0, 1)


def gain_of(way: Way, of_none: float, rows: int = 1, **facts: Any) -> Gain:
    names = ("predicted", "drafting", "acceptance_rate", "block_efficiency", "identity", "failure")
    usual = {"spread": 0.02, "visits": 3, "tokens": 64.0} | ({"drafting": 1.0, "block_efficiency": 9.0})
    return Gain(way, rows, 10.0, of_none, of_none, **(dict.fromkeys(names) | usual | facts))


GENERATED, NONE, AUTO, SELF, MODEL = (
    Way(GENERATE), Way("none"), Way("auto"), Way("self", 3), Way("model", 7, None, "small"),
)  # fmt: skip


def chosen(auto: float, own: float, **facts: Any) -> Way | None:
    found = [gain_of(GENERATED, 1.0), gain_of(NONE, 1.0), gain_of(AUTO, auto), gain_of(SELF, own, **facts)]
    return choose(found)[0]


def test_what_gains_too_little_or_is_wrong_is_not_recommended() -> None:
    assert chosen(1.0, 1.04) is None
    assert chosen(0.9, 0.9) is None
    assert chosen(1.2, 1.0) is AUTO
    assert chosen(1.2, 1.24) is AUTO
    assert chosen(1.2, 1.3) is SELF
    assert chosen(0.8, 1.1) is SELF
    assert chosen(1.0, 9.0, failure="out of memory") is None
    assert chosen(1.0, 9.0, identity=Identity(4, 3, 0, 1)) is None
    assert chosen(1.0, 9.0, identity=Identity(4, 3, 0, 0, 1)) is None
    assert chosen(1.0, 9.0, identity=Identity(4, 3, 1, 0)) is SELF
    # Over the batches: 1.1 for self, 2 for the model.
    many = [gain_of(way, gain, rows) for rows in (1, 8) for way, gain in [(GENERATED, 1.0), (NONE, 1.0), (SELF, 1.1)]]
    way, speedup = choose([*many, gain_of(MODEL, 4.0), gain_of(MODEL, 1.0, 8)])
    assert way is MODEL and math.isclose(speedup, 2.0)
    assert choose([*many, gain_of(MODEL, 4.0)])[0] is SELF  # the model was left out at batch 8


def test_what_tokens_per_block_do_not_explain_is_noise() -> None:
    assert chosen(1.0, 1.2, block_efficiency=1.0) is None  # nothing was accepted
    assert chosen(1.0, 1.2, drafting=0.0) is None  # nothing was drafted
    assert chosen(1.0, 3.0, block_efficiency=1.04) is None
    found = [gain_of(NONE, 1.0), gain_of(SELF, 3.0, drafting=0.5, block_efficiency=2.0)]
    assert choose(found) == (SELF, 1.5)
    assert chosen(1.0, 1.2, spread=0.25) is None
    assert chosen(1.0, 1.2, spread=0.15) is SELF


def test_thin_measurements_recommend_nothing() -> None:
    def text(*rows: int, **facts: Any) -> str:
        ways = [(GENERATED, 0.5), (NONE, 1.0), (AUTO, 1.0), (SELF, 1.5)]
        found = [gain_of(way, gain) for way, gain in ways]
        found += [gain_of(way, gain, 8, **facts) for way, gain in ways if rows]
        return recommend(found, "model", "float32", False)

    assert "recommended: self, γ 3, 1.50 times as fast as decoding without drafts\n" in text(8)
    for thin in ({"tokens": 31}, {"visits": 2}):
        assert "(of batch 1 alone; batch 8 is thin)" in text(8, **thin)
        found = [gain_of(NONE, 1.0), gain_of(SELF, 9.0, **thin)]
        assert "no recommendation" in recommend(found, "model", "float32", False)
    text_of = [recommend([gain_of(NONE, gain), gain_of(SELF, 1.0)], "model", "float32", False) for gain in (1.0, 0.9)]
    assert all("nothing here is clearly faster than decoding without drafts; keep" in it for it in text_of)
    assert ["leave assistant_strategy out" in it for it in text_of] == [False, True]


@pytest.mark.parametrize("way", [AUTO, Way("self", 7), Way("model", 3, None, "org/small")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_configs_can_be_pasted_and_do_what_was_measured(way: Way, dtype: str, tmp_path: Path) -> None:
    call, config = config_to_paste(way, dtype, False)
    arguments = eval(f"dict({call})", {"SpeculativeConfig": SpeculativeConfig})
    assert (arguments["assistant_strategy"], arguments.get("assistant_model")) == (way.strategy, way.assistant)
    assert arguments.get("speculative_config", SpeculativeConfig()) == way.config
    names = {"SpecGRPOConfig": SpecGRPOConfig, "SpeculativeConfig": SpeculativeConfig, "torch": torch}
    options = f"output_dir={str(tmp_path)!r}, use_cpu=True, "
    made = eval(config.replace("SpecGRPOConfig(", f"SpecGRPOConfig({options}"), names)
    assert (made.assistant_strategy, made.assistant_model) == (way.strategy, way.assistant)
    assert made.bf16 is False
    assert (made.model_init_kwargs or {}).get("dtype", "float32") in (dtype, getattr(torch, dtype))
    if way.draft_length:
        assert made.rollout_config().draft_length == way.draft_length
