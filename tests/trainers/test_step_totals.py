"""Seconds of a step's phases, and sums over a rollout's calls and ranks, by hand."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from spec_trl.generation.engine.statistics import (
    BestOfNStatistics,
    DraftCounts,
    LearningStatistics,
    PlanChange,
    RequestTimeline,
    RoundPoint,
    SpeculationStatistics,
)
from spec_trl.generation.planner.control import Tally
from spec_trl.trainers import step_totals
from spec_trl.trainers.run_log import RolloutRecord
from spec_trl.trainers.step_totals import RolloutSums, StepClock, metrics


def test_the_turns_of_a_rollout_and_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns go on where the one before ended, preparation included. Over ranks counts add up and the slowest rank
    counts; what one rank does not know none knows."""
    first = SpeculationStatistics(
        "self", seconds=3.0, plain_seconds=4.0, reason="first", predicted_speedup=1.3,
        completion_curve=[(2.0, 4), (3.0, 8)],
        ended_in=[6] * 4 + [9] * 4, speculating=[PlanChange(0, 5, 8, "self"), PlanChange(8, 0, 4)],
        rounds=9, tokens=200, logprob_sum=-300.0,
        points=[RoundPoint(8, 20.0, 5, "self", 8, 2.0, 190), RoundPoint(4, 30.0, 0, None, 1, 0.5, 10)],
        total=DraftCounts(100, 60, 30, 30, 20, 190), per_depth={0: DraftCounts(100, 60, 30, 30, 20, 190)},
        timeline=[RequestTimeline(0, [(0.0, 0, ["self"])], 3.0)], phase_seconds={"draft": 1.0},
        best_of_n=BestOfNStatistics(2, {"self": 3, "ngram": 1}), learning=LearningStatistics(2, 0.5, 0.25),
        tallies={"self": Tally(9, 72, 200, 2.0)},
    )  # fmt: skip
    later = replace(first, seconds=1.0, plain_seconds=1.5, reason="later", predicted_speedup=None)
    sums = RolloutSums()
    for statistics in (first, later):
        sums.add(statistics, 8, statistics.seconds + 0.25)
    sums.longest["refresh_seconds"] += 0.125

    def record_with(**durations: float) -> RolloutRecord:
        """Of two ranks: this one, and one of the same counts and other durations."""
        whole, other = copy.deepcopy(sums), (sums.summed, sums.longest | durations, 1.0)
        monkeypatch.setattr(step_totals, "gather_object", lambda own: [*own, other])
        whole.over_ranks(["self", "tts"])
        return whole.record("train", 3, 2, "auto", {"self": 5, "tts": 7})

    record = record_with(plain_seconds=5.0, drafter_update_seconds=9.0)
    assert (record.plain_seconds, record.seconds, record.refresh_seconds) == (6.0, 4.5, 0.125)
    assert (record.tail_seconds, record.tail_rounds, record.drafter_update_seconds) == (2.0, 6, 9.0)
    assert record.rank_seconds == [4.5, 1.0] and record.idle_share == pytest.approx(1 - 5.5 / 9)
    assert (record.reason, record.predicted_speedup) == ("first", 1.3)
    assert (record.drafter, record.draft_length, record.mean_draft_length) == ("self", 5, 5.0)
    assert (record.tokens, record.requests, record.target_entropy, record.rounds) == (800, 32, 1.5, 18)
    assert (record.sd_on_fraction, record.drafted_by) == (8 / 9, {"self": 8 / 9, "tts": 0.0})
    assert (record.race_wins, record.drafter_updates) == ({"self": 12, "ngram": 4}, 8)
    assert record.per_depth == {0: DraftCounts(400, 240, 120, 120, 80, 760)}
    assert (record.block_efficiency, record.acceptance_rate, record.first_token_acceptance) == (760 / 120, 0.6, 2 / 3)
    assert [plan[:2] for plan in record.speculating] == [(0, 5), (8, 0), (9, 5), (17, 0)]
    assert record.speculating[2] == PlanChange(9, 5, 8, "self") and record.phase_seconds == {"draft": 2.0}
    assert record.completion_curve == [(2.0, 4), (3.0, 8), (5.25, 12), (6.25, 16)]
    assert record.timeline[-1] == RequestTimeline(8, [(3.25, 9, ["self"])], 6.25)
    assert record.points[:2] == [
        RoundPoint(8, 20.0, 5, "self", 8, 2.0, 190), RoundPoint(4, 30.0, 0, None, 1, 0.5, 10)
    ]  # fmt: skip
    logged = metrics(record, refreshes=False, several_chains=True)
    assert {name: logged[name] for name in ("drafted_by_self", "race_wins_self", "race_wins_tts")} == {
        "drafted_by_self": 8 / 9, "race_wins_self": 12, "race_wins_tts": 0,
    }  # fmt: skip
    assert (logged["drafter_updates"], logged["drafter_update_seconds"]) == (8, 9.0)
    assert record_with(plain_seconds=7.0).plain_seconds == 7.0
    assert record_with(plain_seconds=math.inf).plain_seconds is None


def test_a_long_curve_is_logged_in_part() -> None:
    curve = [(float(at), at) for at in range(1, 1002)]
    sums = RolloutSums()
    sums.add(SpeculationStatistics("none", completion_curve=curve), len(curve), 2000.0)
    logged = sums.record("eval", 0, 0, "none", {}).completion_curve
    assert len(logged) <= step_totals.CURVE_POINTS and logged[-1] == curve[-1] and set(logged) <= set(curve)


class Device:
    """A GPU that has a second of work left for each piece that was not waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.left = 0.0, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def work(self) -> None:
        self.left += 1.0

    def wait(self, device: torch.device) -> None:
        assert device == torch.device("cuda:1")
        self.now, self.left = self.now + self.left, 0.0


def test_phases_have_the_work_that_they_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = Device(monkeypatch), {}
    clock = StepClock(torch.device("cuda:1"), lambda step, seconds, phases: found.update(phases, step=seconds))
    device.work()  # of the step before
    clock.on_step_begin(None, None, None)
    with clock.phase("prepare"):
        with clock.phase("rollout"):
            device.work()
        with clock.phase("logprobs"):
            device.work()
        device.work()
    device.work()
    clock.on_step_end(None, type("State", (), {"global_step": 1}), None)
    expected = {"step": 4.0, "rollout": 1.0, "reward": 0.0, "logprobs": 1.0, "adaptation": 0.0, "update": 1.0}
    assert found == expected | {"other": 1.0}
