"""A log as a world: what its rounds took, how good its drafts were, and how long its texts, come back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.control_worlds import Cell, Decoder, Noise, World, decode
from benchmarks.recorded_world import RecordedMachine, RecordedWorld
from spec_trl.generation.engine.record import Round, points_and_plans
from spec_trl.generation.engine.statistics import RoundPoint
from spec_trl.generation.planner.control import Candidate, Chain, Control, Tally
from spec_trl.trainers.run_log import LOG_FILE, RolloutRecord, RunLog
from tests.cli.sample_run import make_header, make_rollout


PLANS = [(), (Chain(0, 5),), (Chain(1, 10),), (Chain(0, 2),), (), (Chain(0, 5), Chain(1, 2)), (Chain(0, 10),)]
NAMES = ["self", "ngram"]


class Recorder(Control):
    """Goes through `PLANS`, and writes what the rounds did as the engine and the trainer do."""

    def __init__(self) -> None:
        self.candidates = [Candidate("self", 10, 1.0, 100), Candidate("ngram", 10, 1.0, 100, is_network=False)]
        self.tallies = [Tally(), Tally()]
        self.records: list[RolloutRecord] = []

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self._rounds, self._seconds = list[Round](), 0.0
        self._ends: list[float] = []
        self._requests = len(prompts)

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        ended = self._requests - waiting - len(requests) - len(self._ends)
        self._ends += [self._seconds] * ended
        plan = PLANS[len(self._rounds) // 3 % len(PLANS)]
        self._rounds.append(Round(self._seconds, list(requests), length, plan))
        return plan

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        self._seconds += seconds
        self._rounds[-1] = replace(self._rounds[-1], draft_length=draft_length, seconds=seconds, tokens=tokens)

    def drop(self, index: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self._ends += [self._seconds] * (self._requests - len(self._ends))
        points, _ = points_and_plans(self._rounds, NAMES)
        curve = [(second, done) for done, second in enumerate(self._ends, 1)]
        changes = dict(points=points, completion_curve=curve, timeline=[], first_token_acceptance=None)
        self.records.append(make_rollout(len(self.records), **changes))


def recorded(world: World, folder: Path) -> RecordedWorld:
    control = Recorder()
    for number in range(len(world.rollouts)):
        decode(control, world, number, Noise())
    log = RunLog(folder / LOG_FILE)
    log.append(make_header(settings={"draft_lengths": [5, 10]}))
    for record in control.records:
        log.append(record)
    return RecordedWorld(folder)


@pytest.mark.parametrize("refill", [1, 3])
def test_a_simulated_world_comes_back_from_its_log(refill: int, tmp_path: Path) -> None:
    """But for lookups, which are about as good on each row: which rows they are good on the log does not say."""
    world = World(Cell(16, "pays", refill), 0, rollouts=4)
    found = recorded(world, tmp_path)
    assert found.methods == ["ngram", "self"] and found.networks == ["self"] and found.draft_lengths == [2, 5, 10]
    assert (found.cell.batch, found.cell.refill, len(found.rollouts)) == (16, refill, 4)
    assert found.prompt == pytest.approx(world.prompt, abs=10)
    for plan in [(), (("self", 5),), (("self", 10),), (("self", 5), ("ngram", 2))]:
        ours, theirs = (sum(Decoder(each, number).play(plan) for number in range(4)) for each in (found, world))
        assert ours == pytest.approx(theirs, rel=0.07), plan
    for own, real in zip(found.rollouts, world.rollouts, strict=True):
        assert sum(own.lengths) == pytest.approx(sum(real.lengths), rel=0.02)
        assert len(own.lengths) == len(real.lengths) == 16 * refill


def test_rounds_take_what_was_measured_and_straight_lines_between() -> None:
    plain = [RoundPoint(8, 100.0, 0, None, 10, 10 * 1.0, 80), RoundPoint(8, 300.0, 0, None, 10, 10 * 2.0, 80)]
    plain += [RoundPoint(2, 100.0, 0, None, 10, 10 * 0.4, 20)]
    drafted = [RoundPoint(8, 100.0, 4, "self", 10, 10 * 3.0, 200), RoundPoint(8, 100.0, 8, "self", 10, 10 * 4.0, 200)]
    both = [RoundPoint(8, 100.0, 12, "self+ngram", 10, 10 * 5.0, 300)]
    other = [RoundPoint(8, 100.0, 2, "history", 10, 10 * 1.5, 90)]
    machine = RecordedMachine([*plain, *drafted, *both, *other])

    def seconds(batch: int, length: float, width: int, **lengths: int) -> float:
        return machine.round_seconds(batch, length, lengths, width)

    assert seconds(8, 96, 0) == 1.0 and seconds(8, 192, 0) == pytest.approx(1.46) and seconds(8, 900, 0) == 2.0
    assert seconds(5, 96, 0) == pytest.approx(0.7)  # between the batches
    assert [seconds(8, 96, n, self=n) for n in (2, 4, 6, 8, 16)] == pytest.approx([2.0, 3.0, 3.5, 4.0, 7.0])
    # What drafting takes with two rows was never measured: as much less as plain rounds do, 1.5 s on average.
    assert seconds(2, 96, 4, self=4) == pytest.approx(3.0 * 0.4 / 1.5, rel=1e-3)
    assert seconds(8, 96, 12, ngram=4, self=8) == 5.0 and seconds(8, 96, 6, ngram=2, self=4) == pytest.approx(3.0)
    assert seconds(8, 96, 6, history=2, self=4) == pytest.approx(1.0 + 0.5 + 2.0)  # these two never drafted together
    # By chance a short draft was faster than none: a longer one is not faster yet.
    machine = RecordedMachine([*plain, RoundPoint(8, 100.0, 2, "ngram", 1, 1 * 0.7, 8)])
    assert seconds(8, 96, 2, ngram=2) == seconds(8, 96, 10, ngram=10) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="no round of this run was plain"):
        RecordedMachine(drafted)


def test_a_log_without_drafts_is_refused(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header())
    log.append(make_rollout(0, points=[RoundPoint(4, 9.0, 0, None, 9, 9 * 1.0, 36)]))
    with pytest.raises(ValueError, match="no training rollout drafted"):
        RecordedWorld(tmp_path)
