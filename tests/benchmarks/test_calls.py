"""Ratios, shares and identity of timed calls: mistakes here would falsify every figure. No test looks at a time."""

import math
from dataclasses import asdict

import torch

from benchmarks import control_machine, rollout
from benchmarks.calls import Call
from benchmarks.rollout import PLAIN, Run
from benchmarks.workload import Workload
from spec_trl.generation.engine.statistics import DraftCounts, RoundPoint, SpeculationStatistics


WORK = Workload([[1, 2], [3]], 10, 1.0, (), 0)


def call(seconds: float, rows: list[list[int]], drafted: int, prefill: float = 0.0, drafts: int = 0) -> Call:
    """Of ten rounds, of which some `drafted`."""
    total = DraftCounts(blocks=drafts, committed=3 * drafts)
    phases = {"prefill": prefill, "control": 0.1}
    points = [RoundPoint(2, 9.0, 5, "self", drafted), RoundPoint(2, 9.0, 0, None, 10 - drafted)]
    statistics = SpeculationStatistics("self", total, rounds=10, points=points, phase_seconds=phases)
    return Call(seconds, [list(row) for row in rows], statistics)


def test_starts_are_paired_call_by_call() -> None:
    def starts(*repeats: tuple[float, float], cpu: float = 1.0) -> list[control_machine.Start]:
        return [control_machine.Start([call(s, [[1], [2]], 0) for s in each], [cpu, cpu]) for each in repeats]

    made = {"none": starts((1, 1), (2, 2), (9, 9)), "auto": starts((2, 1), (4, 1), (12, 3), cpu=4.0)}
    made |= {"self": starts((2, 2), (9, 9), (9, 9)), "ngram": starts((1, 1), (1, 0.25), (6, 6))}
    made["ngram"][1].calls[0].completions[0] = [7]
    cell = control_machine.summarise("story", WORK, made)
    assert cell.to_none["auto"] == {"all": 0.8, "first": 0.5, "later": 2.0, "cpu": 0.25}
    assert cell.to_none_by_repeat == [2 / 3, 0.8, 1.2] and cell.to_none["self"]["all"] == 0.5
    # Medians of a start: none of 2, 4 and 18 seconds, self of 4, 18 and 18, ngram of 1.25, 2 and 12.
    assert (cell.better, cell.to_better) == ("ngram", 2 / 3)
    assert (cell.identical_rows, cell.rows) == (35, 36)
    alone = {name: [control_machine.Start(each.calls[:1], [1.0]) for each in own] for name, own in made.items()}
    assert set(control_machine.summarise("story", WORK, alone).to_none["auto"]) == {"all", "first", "cpu"}


def test_rollouts_are_compared_pass_by_pass_and_for_identity() -> None:
    def run(rows: list[list[int]], seconds: float) -> Run:
        return Run(rows, seconds=seconds)

    runs = {
        PLAIN: [run([[1, 2, 3, 4]], 4.0), run([[1, 2]], 1.0), run([[7, 8]], 1.0)],
        "ours self": [run([[1, 2, 9, 4]], 1.0), run([[1, 2]], 1.0), run([[7, 8]], 2.0)],
    }
    summary = rollout.summarise("ours self", runs)
    assert summary.ratio_to == {PLAIN: 1.0}  # of 4, 1 and 0.5
    assert (summary.identical_rows, summary.rows) == (2, 3)
    assert math.isnan(summary.block_efficiency)
    assert rollout.summarise(PLAIN, runs).identical_rows is None


def test_auto_is_compared_with_the_best_of_the_other_ways_of_ours() -> None:
    speeds = {rollout.GENERATE: [9.0, 9.0], PLAIN: [2.0, 4.0], "ours self": [4.0, 4.0], rollout.AUTO: [6.0, 4.0]}
    runs = {
        name: [Run([[1]], seconds=1 / speed, rounds=4, drafted_rounds=name != PLAIN) for speed in each]
        for name, each in speeds.items()
    }
    summaries = [asdict(rollout.summarise(name, runs)) for name in runs]
    result = {"target": {"model": "m", "dtype": "d"}, "batches": {"4": summaries}}
    found = {(each.what, each.baseline): each for each in rollout.findings(result)}
    against = found["m, d, batch 4: ours auto", "the best of the others: ours self"]
    assert (against.value, against.interval) == (1.25, (1.0, 1.5))
    assert found["m, d, batch 4: ours self, rounds that drafted", ""].value == 0.25
    assert ("m, d, batch 4: ours none, rounds that drafted", "") not in found


def test_a_warm_up_has_work_of_its_own() -> None:
    """Else a history would have seen what the first timed pass writes."""
    seen: list[tuple[Workload, int]] = []
    method = lambda work, seed: (seen.append((work, seed)), Run([[1]]))[1]  # noqa: E731
    works = [Workload([[n]], 9, 1.0, (), 0) for n in range(3)]
    rollout.compare({"a": method}, works, torch.device("cpu"), 5, int)
    assert seen == [(works[0], 5), (works[1], 6), (works[2], 7)]
    seen.clear()
    rollout.compare({"a": method, rollout.AUTO: method}, works, torch.device("cpu"), 5, int, warm_up_tokens=3)
    assert [work.max_new_tokens for work, _ in seen] == [3, 9, 9, 9, 9, 9]  # the first call of auto is a whole one
