"""``spec-trl bench``: what it measures, how it judges, and what it recommends, on tiny models."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from examples.demo.task import build_tokenizer
from spec_trl import SpecGRPOConfig, SpeculativeConfig
from spec_trl.cli import gains
from spec_trl.cli.gains import GENERATE, Call, Gain, Identity, Way, Work, choose, compare, config_to_paste, measure
from spec_trl.cli.main import main
from spec_trl.generation.engine.statistics import SpeculationStatistics
from spec_trl.measuring.fill_profile import profile_key
from spec_trl.measuring.profile_cache import cache_directory
from tests.cli.sample_run import make_profile


WORK = Work([[1, 2, 3]], 64, 1.0)


def bench(model: Path, *options: str) -> int:
    return main(["bench", str(model), "--length", "6", "--seconds", "0.001", "--draft-length", "2", *options])


def test_all_ways_are_measured_and_compared(
    model: Path, tmp_path: Path, tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tiny_assistant.save_pretrained(tmp_path / "small")
    key = profile_key(tiny, SpeculativeConfig())
    replace(make_profile(), key=key).save(cache_directory() / key.file_name)
    assert bench(model, "--batch", "3,1", "--assistant", f"model={tmp_path / 'small'}") == 0
    printed = capsys.readouterr().out
    assert "float64" in printed and "torch 2" in printed and "random prompts" in printed
    assert "not possible" not in printed
    for batch in (1, 3):
        lines = printed.partition(f"batch {batch}, up to 6 tokens per row, median of 1:")[2].splitlines()[2:8]
        names = ["generate", "none", "self, γ 2", "ngram, γ 2", "history, γ 2", "model, γ 2"]
        for name, line in zip(names, lines, strict=True):
            assert line.strip().startswith(name)
            rows = f"{2 * batch} of {2 * batch}"  # two visits, float64: no row may differ
            assert line.endswith(rows) == (name not in ("generate", "none"))
            predicted = line.strip().removeprefix(name).split()[3]
            assert (predicted != "-") == (name not in ("generate", "none"))
    assert "recommended: " in printed and "no prediction" not in printed


def test_prompts_of_a_file_greedily(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a3+b8=\nc5=\n")
    assert bench(tmp_path / "model", "--prompts", str(prompts), "--temperature", "0", "--batch", "2") == 0
    printed = capsys.readouterr().out
    assert f"prompts of {prompts}; temperature 0" in printed and "no prediction: no run has calibrated" in printed
    assert printed.count("4 of 4") == 3


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, eq=False)
class FakeWay(Way):
    """Takes `seconds` for a token, half a second for the prompts, and generates nothing."""

    seconds: float = 1.0

    def __call__(self, model: PreTrainedModel, work: Work, seed: int, clock: Callable[[], float]) -> Call:
        assert isinstance(clock, Clock)
        started = clock.now
        clock.now += 0.5 + self.seconds * work.new_tokens
        statistics = SpeculationStatistics(self.strategy, phase_seconds={"prefill": 0.5})
        return Call(clock.now - started, [[seed] * work.new_tokens], statistics)


@pytest.mark.parametrize(
    ("seconds", "tokens", "visits"),
    [
        (1.0, 8, 2),  # the probes alone
        (4 * (1.5 + 0.4 * 20) + 2 * (1.5 + 0.4 * 8), 20, 4),  # what fits four times
        (10_000.0, 64, 8),  # all that was asked for
    ],
)
def test_as_many_tokens_are_measured_as_the_time_allows(
    seconds: float, tokens: int, visits: int, tiny: LlamaForCausalLM
) -> None:
    clock, turns = Clock(), []
    ways = [FakeWay(GENERATE, seconds=0.1), FakeWay("none", seconds=0.1), FakeWay("self", 3, seconds=0.2)]
    work, calls = measure(tiny, ways, WORK, 5, seconds + 0.01, clock, lambda way: turns.append(way.strategy))
    assert work.new_tokens == tokens
    assert [len(made) for made in calls.values()] == [visits] * 3
    assert turns[:9] == [GENERATE, "none", "self", "none", "self", GENERATE, GENERATE, "none", "self"][: len(turns)]
    assert [call.completions[0][0] for call in calls[ways[0]]] == list(range(5, 5 + visits))  # a seed per visit
    assert clock.now <= max(seconds + 0.01, 2 * (1.5 + 0.4 * 8))


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
    monkeypatch.setattr(gains, "logit_noise", lambda *_: 2 * gap)
    assert compare(tiny, work, 7, [plain], [other], 3) == Identity(1, 0, 1, 0)
    assert compare(tiny, work, 7, [plain], [call_of(row[:5])], 3) == Identity(1, 0, 0, 1)


def gain_of(way: Way, of_generate: float, **facts: Any) -> Gain:
    names = ("predicted", "drafting", "acceptance_rate", "block_efficiency", "identity", "failure")
    return Gain(way, 10.0, of_generate, of_generate, **(dict.fromkeys(names) | facts))


def test_what_gains_too_little_or_is_wrong_is_not_recommended() -> None:
    generate, none, self_, model = Way(GENERATE), Way("none"), Way("self", 3), Way("model", 7, None, "small")

    def chosen(plain: float, own: float, **facts: Any) -> Way:
        return choose([gain_of(generate, 1.0), gain_of(none, plain), gain_of(self_, own, **facts)])[0]

    assert chosen(1.0, 1.04) is generate
    assert chosen(1.2, 1.22) is none
    assert chosen(1.2, 1.3) is self_
    assert chosen(0.8, 1.1) is self_
    assert chosen(1.0, 9.0, failure="out of memory") is generate
    assert chosen(1.0, 9.0, identity=Identity(4, 3, 0, 1)) is generate
    assert chosen(1.0, 9.0, identity=Identity(4, 3, 1, 0)) is self_
    # Over the batches: 1.1 for self, 2 for the model.
    many = [gain_of(generate, 1.0), gain_of(none, 1.0), gain_of(self_, 1.1), gain_of(model, 4.0), gain_of(model, 1.0)]
    way, speedup = choose(many)
    assert way is model and math.isclose(speedup, 2.0)


@pytest.mark.parametrize("way", [Way("none"), Way("self", 7), Way("model", 3, None, "org/small")])
def test_configs_can_be_pasted(way: Way, tmp_path: Path) -> None:
    call, config = config_to_paste(way, [3, 7])
    arguments = eval(f"dict({call})", {"SpeculativeConfig": SpeculativeConfig})
    assert (arguments["assistant_strategy"], arguments.get("assistant_model")) == (way.strategy, way.assistant)
    options = f"output_dir={str(tmp_path)!r}, bf16=False, "
    made = eval(config.replace("SpecGRPOConfig(", f"SpecGRPOConfig({options}"), {"SpecGRPOConfig": SpecGRPOConfig})
    assert (made.assistant_strategy, made.assistant_model) == (way.strategy, way.assistant)
    if way.draft_length:
        assert arguments["speculative_config"].draft_length == way.draft_length
        assert made.speculative_config().draft_length == way.draft_length
