"""The best-of-N benchmarks: copying, choices, modelled seconds, and that they run. No test looks at a time."""

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import best_of_n, best_of_n_tail
from benchmarks.best_of_n_bias import Sample, compare, first_words, more_predictable, predictable
from benchmarks.best_of_n_subject import identical_rows
from benchmarks.best_of_n_tail import A100, control_on_a100, seconds_on_a100
from benchmarks.copying import Copying, copy_heavy
from benchmarks.never_slower import Call
from spec_trl.generation.engine.statistics import SpeculationStatistics
from spec_trl.scheduling.ladder import Choice


def call(seconds: float, rows: list[list[int]]) -> Call:
    return Call(
        seconds, rows, SpeculationStatistics("none", rounds=9, speculating=[(0, 0)], phase_seconds={"control": 0.1})
    )


# ---- work -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [[4, 5, 6], [4, 5, 19], [4, 19, 6], [19, 5, 6]])
def test_a_passage_is_copied_and_other_text_is_left_alone(begun: list[int]) -> None:
    """A token in another's place does not end it."""
    scores = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    texts = torch.tensor([[4, 5, 6, 7, 8, *begun], [1, 2, 3, 4, 9, 9, 5, 6]])
    raised = Copying(3, 0.9)(texts, scores).softmax(-1)
    weights = scores[0].exp()
    share = 9 * weights.sum() / (10 * weights.sum() - weights[7])  # its own weight gives way to 9 times all of them
    assert raised[0, 7] == pytest.approx(share.item(), abs=1e-5) and raised[0].argmax() == 7
    assert raised[1].tolist() == pytest.approx(scores[1].softmax(-1).tolist())
    assert Copying(3, 0.9)(texts[:, :3], scores) is scores


def test_the_newest_of_several_is_copied() -> None:
    texts = torch.tensor([[4, 5, 6, 7, 4, 5, 6, 9, 4, 5, 6]])
    assert Copying(3, 0.9)(texts, torch.zeros(1, 20)).argmax() == 9


def test_copy_heavy_prompts_say_it_twice_and_begin_again() -> None:
    assert copy_heavy([1, 2, 3, 4, 5, 6], passage=4, begun=2) == [1, 2, 3, 4, 2, 3, 4, 2, 3]


# ---- choices --------------------------------------------------------------------------------------------------------


def test_the_choice_is_judged_by_what_measured() -> None:
    class Timeline:
        def __init__(self, *changes: tuple[float, int, list[str]]) -> None:
            self.changes = list(changes)

    def ours(*changes: tuple[float, int, list[str]]) -> Call:
        made = call(1.0, [[1, 2]])
        made.statistics.timeline = [Timeline(*changes)]  # type: ignore[list-item]
        return made

    calls = {
        "none": [call(2.0, [[1, 2]]), call(2.0, [[1, 3]]), call(4.0, [[1, 2]])],
        "self": [call(1.0, [[1, 2]]) for _ in range(3)],
        "ngram": [call(1.02, [[1, 2]]) for _ in range(3)],
        "watched self": [call(1.25, [[1, 2]]) for _ in range(3)],
        "watched ngram": [call(1.0, [[1, 2]]) for _ in range(3)],
        "self, toggled": [call(2.0, [[1, 2]]) for _ in range(3)],
        "best_of_n": [
            ours((0.0, 0, []), (0.1, 3, ["ngram"]), (0.2, 9, ["self"])),
            ours((0.0, 0, ["ngram"])),
            ours((0.0, 0, []), (0.1, 40, ["self"])),
        ],
    }
    planned = {"self": Choice("self", 5, 1.4), "ngram": Choice("ngram", 10, 1.2)}
    cell = best_of_n.summarise("story", 1, 2, planned, {"self": 3.0, "ngram": None}, calls)
    assert cell.choices == {"ngram": 2, "none": 1} and cell.chosen == "ngram" and cell.best == "self"
    assert cell.chosen_to_best == pytest.approx(1 / 1.02) and cell.is_best
    assert cell.best_watched == "ngram" and cell.chosen_to_best_watched == 1 and cell.is_best_watched
    assert cell.to_none == 2 and cell.to_none_by_repeat == [2, 2, 4] and cell.to_self == 2
    assert (cell.identical_rows, cell.rows) == (2, 3) == identical_rows(calls["best_of_n"], calls["none"])
    calls["ngram"] = [call(1.2, [[1, 2]]) for _ in range(3)]
    assert not best_of_n.summarise("story", 1, 2, planned, {"self": 3.0, "ngram": None}, calls).is_best


def test_seconds_on_the_a100() -> None:
    plain = A100.target_seconds(4, 256)
    assert seconds_on_a100(4, 256, 0, {}) == plain
    assert seconds_on_a100(4, 256, 5, {"ngram": 5}) == A100.verify_seconds(4, 256, 5)
    assert seconds_on_a100(4, 256, 5, {"self": 5}) == pytest.approx(A100.cycle_seconds(4, 256, 5))
    raced = seconds_on_a100(4, 256, 15, {"model": 5, "ngram": 10})
    assert raced == pytest.approx(A100.verify_seconds(4, 256, 15) + 0.5 * plain)


def test_rounds_are_recorded_as_on_the_a100() -> None:
    control = control_on_a100(("ngram", "model"), (5, 10), 4, race=False)
    control.begin(4, ["a"] * 4)
    plan = control.plan([0, 1, 2, 3], 100.0, 0)
    control.record(plan[0].draft_length if plan else 0, 123.0, 4)
    assert 0 < control.seconds < 1


# ---- bias -----------------------------------------------------------------------------------------------------------


def test_predictable() -> None:
    assert predictable([1, 2, 3, 4, 1, 2, 3], [4, 1, 2]) == 1
    assert predictable([1, 2, 3, 4, 1, 2, 3], [5, 1, 2]) == 0
    assert first_words("a b a B") == 0.5


def test_a_biased_sample_is_told_apart() -> None:
    rng = random.Random(0)

    def sample() -> Sample:
        lengths = [rng.randrange(20, 200) for _ in range(1000)]
        # Longer texts repeat more.
        return Sample(lengths, [1 - n / 400 + rng.random() / 10 for n in lengths], [n / 200 for n in lengths])

    one, other = sample(), sample()
    assert min(compare(one, other).values()) > 0.05
    biased = more_predictable(one, other)
    assert biased.lengths == list(map(max, one.lengths, other.lengths))
    assert max(compare(biased, one).values()) < 1e-6


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        (best_of_n, ["--batch", "2", "--new-tokens", "12", "--kinds", "copy-heavy", "story"]),
        (best_of_n_tail, ["--batch", "2", "--new-tokens", "12"]),
    ],
)
@pytest.mark.slow
def test_it_runs(module: Any, extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.json"
    pools = ["--pools", "self,ngram"] if module is best_of_n_tail else []
    argv = ["x", "--models", "shape:tiny,float32", *extra, *pools, "--rollouts", "1", "--repeats", "2"]
    argv += ["--calibration-seconds", "1", "--threads", str(torch.get_num_threads()), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    module.main()
    result = json.loads(output.read_text())
    report = output.with_suffix(".md").read_text()
    if module is best_of_n:
        cells = result["models"][0]["cells"]
        assert [cell["kind"] for cell in cells] == ["copy-heavy", "story"]
        assert all(cell["identical_rows"] == cell["rows"] == 4 for cell in cells)
        assert all(math.isfinite(cell["to_none"]) for cell in cells)
        assert cells[0]["block_efficiency"]["ngram"] > cells[1]["block_efficiency"]["ngram"]
        assert Counter(report.splitlines())["## The methods by themselves"] == 1
    else:
        (pool,) = result["pools"]
        assert all(each["identical_rows"] == each["rows"] == 4 for each in pool["results"])
        assert pool["best_single"] in report
        assert all(each["forwards"] <= 12 for each in pool["results"])
