"""Did it help? Sums by hand: of a rollout's calls and ranks, and of a run's rollouts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from spec_trl.generation.engine.statistics import (
    DraftCounts,
    LearningStatistics,
    PlanChange,
    RacingStatistics,
    RequestTimeline,
    RoundPoint,
    SpeculationStatistics,
)
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate, Tally
from spec_trl.trainers import rollout_totals, run_log
from spec_trl.trainers.rollout_totals import RolloutTotals, metrics
from spec_trl.trainers.run_log import LOG_FILE, RolloutRecord, RunLog, read_run
from spec_trl.trainers.verdict import MORE, Verdict, verdict_of
from tests.cli.sample_run import make_header, make_rollout, make_step


def rollout(index: int, seconds: float, plain: float | None, share: float = 0.5, **changes: object) -> RolloutRecord:
    return make_rollout(
        index, seconds=seconds, plain_seconds=plain, sd_on_fraction=share, rounds=100, reason="why", **changes
    )


REASON = "speculation predicted 0.66× at 64 rows × 300 tokens: decoding plainly"
PLAIN = [make_rollout(i, seconds=6.0, plain_seconds=6.0, sd_on_fraction=0.0, reason=REASON) for i in range(2)]
NOTHING = f"nothing was drafted ({REASON}): rollouts were plain decoding"
UNKNOWN = "drafting in 50% of rounds; the speedup over plain decoding is not known: "
SAVED = "5.0 s saved (calibration and refresh subtracted), drafting in 50% of rounds"
ADAPTED = "4.5 s lost (calibration, adaptation and refresh subtracted), drafting in 50% of rounds."
EVALUATION = rollout(0, 50.0, 1.0, mode="eval")
OLDER = make_rollout(0, plain_seconds=None, reason=None, sd_on_fraction=0.5)
DRAFTED, NOT_DRAFTED = (run_log.RoundPoint(8, 100.0, gamma, 20, 0.1, 480) for gamma in (5, 0))


@pytest.mark.parametrize(
    ("sentence", "records"),
    [
        (
            "rollouts 1.50× of plain decoding, 110 s saved (calibration and refresh subtracted), drafting in 70% of "
            "rounds.",
            [make_header(calibration_seconds=20.0), rollout(0, 100.0, 160.0, 0.6), make_step(1), EVALUATION]
            + [rollout(1, 100.0, 170.0, 0.8), make_step(2)],
        ),
        (
            f"rollouts 0.74× of plain decoding, {ADAPTED}",
            [make_header(calibration_seconds=3.0), rollout(0, 10.0, 12.5), make_step(1, phases={"adaptation": 4.0})],
        ),
        (f"{NOTHING}; calibration and refresh took 101 s. {MORE}", [make_header(calibration_seconds=101.0), *PLAIN]),
        (f"{NOTHING}. {MORE}", [make_header(), *PLAIN]),
        ("no training rollout was logged.", [make_header()]),
        # No baseline is invented.
        (f"{UNKNOWN}no plain round was measured.", [rollout(0, 10.0, None)]),
        (f"{UNKNOWN}the log is older than this comparison.", [OLDER]),
        (
            f"rollouts 1.50× of plain decoding, {SAVED}; known of 1 of 2 rollouts.",
            [rollout(0, 10.0, None), rollout(1, 10.0, 15.0)],
        ),
        (
            f"rollouts 1.50× of plain decoding as predicted (no round of the run was plain), {SAVED}.",
            [rollout(0, 10.0, 15.0, points=[DRAFTED])],
        ),
        (
            "rollouts 1.50× of plain decoding, 10.0 s saved (calibration and refresh subtracted), drafting in 50% of "
            "rounds (ngram in 45%, self in 10%).",
            [rollout(i, 10.0, 15.0, drafted_by={"self": 0.2 * i, "ngram": 0.45, "model": 0.0}) for i in (0, 1)],
        ),
        (
            f"rollouts 1.50× of plain decoding, {SAVED}.",
            [rollout(0, 10.0, 15.0, points=[DRAFTED, NOT_DRAFTED])],
        ),
    ],
)
def test_the_sentence(sentence: str, records: list[object]) -> None:
    found = Verdict()
    for record in records:
        found.add(record)  # type: ignore[arg-type]
    assert str(found) == sentence


def test_seconds_saved_by_rollout(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    adapting = [make_step(i + 1, phases={"adaptation": 1.0}) for i in range(4)]
    for record in (
        make_header(calibration_seconds=10.0), rollout(0, 5.0, 9.0, step=0), *adapting[:2],
        rollout(1, 5.0, None, step=2), rollout(2, 5.0, 8.0, step=2), *adapting[2:],
    ):  # fmt: skip
        log.append(record)
    found, saved = verdict_of(read_run(tmp_path))
    # Two steps follow the first rollout, and two the last.
    assert saved == [-10 + 4 - 2, -8, -8 + 3 - 2] and saved[-1] == found.saved


def test_the_turns_of_a_rollout_and_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns go on where the one before ended, preparation included. Over ranks counts add up and the slowest rank
    counts; what one rank does not know none knows."""
    control = AlwaysSpeculate(Candidate("self", 5, 4.0, 100))
    control.tallies = [Tally(9, 72, 200, 2.0)]
    first = SpeculationStatistics(
        "self", seconds=3.0, plain_seconds=4.0, reason="first", predicted_speedup=1.3,
        completion_curve=[(2.0, 4), (3.0, 8)],
        ended_in=[6] * 4 + [9] * 4, speculating=[PlanChange(0, 5, 8, "self"), PlanChange(8, 0, 4)],
        rounds=9, tokens=200, logprob_sum=-300.0,
        points=[RoundPoint(8, 20.0, 5, "self", 8, 2.0, 190), RoundPoint(4, 30.0, 0, None, 1, 0.5, 10)],
        total=DraftCounts(100, 60, 30, 30, 20, 190), per_depth={0: DraftCounts(100, 60, 30, 30, 20, 190)},
        timeline=[RequestTimeline(0, [(0.0, 0, ["self"])], 3.0)], phase_seconds={"draft": 1.0},
        racing=RacingStatistics(2, {"self": 3, "ngram": 1}), learning=LearningStatistics(2, 0.5, 0.25),
    )  # fmt: skip
    later = replace(first, seconds=1.0, plain_seconds=1.5, reason="later", predicted_speedup=None)
    totals = RolloutTotals()
    for statistics in (first, later):
        totals.add(statistics, control, 8, statistics.seconds + 0.25)
    totals.durations.refresh_seconds += 0.125

    def record_with(**durations: float) -> RolloutRecord:
        """Of two ranks: this one, and one of the same counts and other durations."""
        other = replace(totals.durations, **durations)
        monkeypatch.setattr(rollout_totals, "gather_object", lambda own: [*own, (totals.counts, other, 1.0)])
        return totals.over_ranks(["self", "tts"]).record("train", 3, 2, "auto", {"self": 5, "tts": 7})

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
        run_log.RoundPoint(8, 20.0, 5, 8, 0.25, 190, "self"), run_log.RoundPoint(4, 30.0, 0, 1, 0.5, 10)
    ]  # fmt: skip
    logged = metrics(record, refreshes=False, races=True)
    assert {name: logged[name] for name in ("drafted_by_self", "race_wins_self", "race_wins_tts")} == {
        "drafted_by_self": 8 / 9, "race_wins_self": 12, "race_wins_tts": 0,
    }  # fmt: skip
    assert (logged["drafter_updates"], logged["drafter_update_seconds"]) == (8, 9.0)
    assert record_with(plain_seconds=7.0).plain_seconds == 7.0
    assert record_with(plain_seconds=math.inf).plain_seconds is None


def test_a_long_curve_is_logged_in_part() -> None:
    curve = [(float(at), at) for at in range(1, 1002)]
    totals = RolloutTotals(completion_curve=curve)
    totals.durations.seconds = 2000.0
    logged = totals.record("eval", 0, 0, "none", {}).completion_curve
    assert len(logged) <= rollout_totals.CURVE_POINTS and logged[-1] == curve[-1] and set(logged) <= set(curve)
