"""A log as a world: what its rounds took, how good its drafts were, and how long its texts, come back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.control_worlds import Cell, Decoder, Noise, World, decode
from benchmarks.recorded_world import RecordedWorld
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


def test_a_simulated_world_comes_back_from_its_log(tmp_path: Path) -> None:
    """But for lookups, which are about as good on each row: which rows they are good on the log does not say."""
    refill = 3
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


def test_a_log_without_drafts_is_refused(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header())
    log.append(make_rollout(0, points=[RoundPoint(4, 9.0, 0, None, 9, 9 * 1.0, 36)]))
    with pytest.raises(ValueError, match="no training rollout drafted"):
        RecordedWorld(tmp_path)
