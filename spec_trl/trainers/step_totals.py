"""Totals of a training step: seconds of its phases, and sums over its rollout's calls and ranks."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from ..distributed.pool import SharedPool
from ..generation.engine.drafter import Drafter
from ..generation.engine.record import thin
from ..generation.engine.statistics import (
    FEWEST_DRAFTED,
    MOST_PLANS,
    DraftCounts,
    PlanChange,
    RequestTimeline,
    RoundPoint,
    SpeculationStatistics,
    added,
    slowest,
)
from ..generation.planner.control import Explanation, Tally
from ..generation.strategies import policy_copies
from ..papers.test_time_speculation.distilled_drafter import DistilledDrafter
from .run_log import TIMELINES, Mode, RolloutRecord


CURVE_POINTS = 200
"""Number of logged points of a completion curve."""


class StepClock(TrainerCallback):
    """Splits each optimizer step into the phases of ER Fig. 2a, 6. It synchronizes a GPU at the end of a phase.

    Args:
        device: of the training.
        on_step: called with (step, seconds, seconds by phase) at the end of a step. Phases are "rollout", "reward",
            "logprobs", "adaptation" (of a learned drafter), "update" (the rest of forward, backward and optimizer) and
            "other" (advantages, logging).

    Attributes:
        in_step: whether an optimizer step is under way, with its rollouts.
    """

    def __init__(self, device: torch.device, on_step: Callable[[int, float, dict[str, float]], None]) -> None:
        self._device = device
        self._on_step = on_step
        self._seconds: dict[str, float] = {}
        self._started = 0.0
        self.in_step = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to `name`; "prepare" surrounds all but update and adaptation."""
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds, self.in_step = {}, True
        self._started = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.in_step = False
        seconds = self._now() - self._started
        prepare, adaptation = (self._seconds.get(name, 0.0) for name in ("prepare", "adaptation"))
        phases = {name: self._seconds.get(name, 0.0) for name in ("rollout", "reward", "logprobs")}
        other = max(prepare - sum(phases.values()), 0.0)
        phases |= {"adaptation": adaptation, "update": seconds - prepare - adaptation, "other": other}
        self._on_step(state.global_step, seconds, phases)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass
class Counts:
    """Counts of a rollout, summed over its calls and over ranks."""

    requests: int = 0
    tokens: int = 0
    logprob_sum: float = 0.0  # of the sampled tokens, in nats
    rounds: int = 0
    drafted_rounds: int = 0
    draft_length_sum: int = 0  # γ, summed over rounds
    rounds_of: dict[str, int] = field(default_factory=dict)  # rounds in which a strategy drafted, alone or with others
    drafter_updates: int = 0
    per_depth: dict[int, DraftCounts] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)  # by strategy
    race_wins: dict[str, int] = field(default_factory=dict)  # by strategy
    moved_rows: int = 0  # rows that moved from rank to rank


@dataclass
class Durations:
    """Durations of a rollout, named as in :class:`RolloutRecord`: sums over its calls, maxima over ranks."""

    seconds: float = 0.0  # without setup
    setup_seconds: float = 0.0
    refresh_seconds: float = 0.0
    drafter_update_seconds: float = 0.0
    tail_seconds: float = 0.0
    tail_rounds: int = 0
    plain_seconds: float = 0.0  # infinite: unknown for one of the calls


@dataclass
class RolloutTotals:
    """Sums over the `generate` calls of one rollout.

    Args:
        turns: number of turns of a tool loop.
        counts, durations: of this rank; after `over_ranks` of all ranks.
        rounds, phase_seconds, speculating, completion_curve, points, timeline: of this rank. Requests, rounds and
            seconds of a later call count from those of the calls before it.
        explanation: of the first call, which has all requests.
        idle_seconds: seconds in which this rank waited for other ranks of its pool.
        rank_seconds: seconds of decoding by rank; set by `over_ranks`.
    """

    turns: int = 0
    counts: Counts = field(default_factory=Counts)
    durations: Durations = field(default_factory=Durations)
    rounds: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    speculating: list[PlanChange] = field(default_factory=list)
    completion_curve: list[tuple[float, int]] = field(default_factory=list)
    points: list[RoundPoint] = field(default_factory=list)
    timeline: list[RequestTimeline] = field(default_factory=list)
    explanation: Explanation | None = None
    idle_seconds: float = 0.0
    rank_seconds: list[float] = field(default_factory=list)

    def add(
        self,
        statistics: SpeculationStatistics,
        requests: int,
        seconds: float,
        pool: SharedPool | None = None,
    ) -> None:
        """Adds a `generate` call that decoded `requests` rows in `seconds`, setup included; `pool`: of ranks."""
        seconds -= statistics.setup_seconds
        begun, rounds, done = self.durations.seconds, self.rounds, self.counts.requests
        self.phase_seconds = added(self.phase_seconds, statistics.phase_seconds)
        self.speculating += [plan._replace(round=rounds + plan.round) for plan in statistics.speculating]
        self.completion_curve += [(begun + second, done + count) for second, count in statistics.completion_curve]
        self.points += statistics.points
        for timeline in statistics.timeline:
            moved = [(begun + second, rounds + round_, names) for second, round_, names in timeline.changes]
            self.timeline.append(RequestTimeline(done + timeline.request, moved, begun + timeline.ended))
        if self.explanation is None:
            self.explanation = Explanation(statistics.predicted_speedup, statistics.reason)
        self.rounds += statistics.rounds
        learning, best_of_n = statistics.learning, statistics.best_of_n
        updates, waited = (0, 0.0) if learning is None else (learning.updates, learning.waited)
        rounds_of: dict[str, int] = {}
        for point in statistics.points:
            for name in (point.drafter or "").split("+") if point.draft_length else ():
                rounds_of[name] = rounds_of.get(name, 0) + point.rounds
        counts = Counts(
            requests, statistics.tokens, statistics.logprob_sum, statistics.rounds, statistics.drafted_rounds,
            sum(point.rounds * point.draft_length for point in statistics.points), rounds_of, updates,
            statistics.per_depth, statistics.tallies, {} if best_of_n is None else best_of_n.wins,
            0 if pool is None else pool.taken_over,
        )  # fmt: skip
        self.counts = added(self.counts, counts)
        tail, plain = statistics.tail(), statistics.plain_seconds
        self.idle_seconds += 0.0 if pool is None else pool.idle_seconds
        plain = math.inf if plain is None else seconds - statistics.seconds + plain
        of_call = Durations(seconds, statistics.setup_seconds, 0.0, waited, tail.seconds, tail.rounds, plain)
        self.durations = added(self.durations, of_call)

    def add_refreshes(self, drafters: Iterable[Drafter]) -> None:
        """Adds the seconds that copies of the policy among `drafters` took to be made or requantized since the last
        call."""
        for copied in policy_copies(drafters):
            self.durations.refresh_seconds += copied.refresh_seconds
            copied.refresh_seconds = 0.0

    def over_ranks(self, strategies: Sequence[str]) -> "RolloutTotals":
        """Returns totals of all ranks, with a tally by strategy for `strategies`. All ranks must call it."""
        ranks = gather_object([(self.counts, self.durations, self.durations.seconds - self.idle_seconds)])
        none = Counts(tallies={name: Tally() for name in strategies})
        counts = reduce(added, [counts for counts, _, _ in ranks], none)
        longest = map(max, zip(*(astuple(durations) for _, durations, _ in ranks), strict=True))
        return replace(
            self, counts=counts, durations=Durations(*longest), rank_seconds=[seconds for _, _, seconds in ranks]
        )

    def record(
        self, mode: Mode, rollout: int, step: int, strategy: str, draft_lengths: dict[str, int]
    ) -> RolloutRecord:
        """Returns the rollout's record for the log; `draft_lengths`: current γ by strategy."""
        counts, durations = self.counts, self.durations
        whole, plain = durations.seconds + durations.setup_seconds, durations.plain_seconds
        drafts = sum(counts.per_depth.values(), DraftCounts())
        drafted_by = {name: counts.rounds_of.get(name, 0) / (counts.rounds or 1) for name in counts.tallies}
        main = max((name for name in drafted_by if drafted_by[name]), key=drafted_by.__getitem__, default=None)
        speculation = sum(counts.tallies.values(), Tally())
        predicted = speculation.predicted_speedup
        if predicted is None and self.explanation is not None:  # the prediction was too low, so nothing was drafted
            predicted = self.explanation.predicted_speedup
        plans: list[Any] = list(self.speculating)
        thin(plans, MOST_PLANS, 0)
        step_size = -(-len(self.completion_curve) // CURVE_POINTS) or 1
        return RolloutRecord(
            mode=mode,
            rollout=rollout,
            step=step,
            strategy=strategy,
            drafter=main,
            tokens=counts.tokens,
            requests=counts.requests,
            phase_seconds=self.phase_seconds,
            block_efficiency=_ratio(drafts.committed, drafts.blocks),
            acceptance_rate=_ratio(drafts.accepted, drafts.drafted),
            first_token_acceptance=_ratio(drafts.first_accepted, drafts.first_drafted),
            # -log p of the sampled tokens is an unbiased estimate of the entropy of the sampling distribution.
            target_entropy=_ratio(-counts.logprob_sum, counts.tokens),
            draft_length=max(draft_lengths.values(), default=0) if main is None else draft_lengths.get(main, 0),
            mean_draft_length=_ratio(counts.draft_length_sum, counts.drafted_rounds),
            sd_on_fraction=counts.drafted_rounds / (counts.rounds or 1),
            predicted_speedup=predicted,
            measured_speedup=speculation.measured_speedup if counts.drafted_rounds >= FEWEST_DRAFTED else None,
            rounds=self.rounds,
            speculating=[PlanChange(*plan) for plan in plans],
            completion_curve=self.completion_curve[::-step_size][::-1],  # with its last point
            per_depth=dict(sorted(counts.per_depth.items())),
            points=self.points,
            timeline=slowest(self.timeline, TIMELINES),
            reason=None if self.explanation is None else self.explanation.reason,
            drafted_by=drafted_by,
            race_wins=counts.race_wins,
            rank_seconds=self.rank_seconds,
            moved_rows=counts.moved_rows,
            drafter_updates=counts.drafter_updates if DistilledDrafter.strategy in drafted_by else None,
            **vars(durations) | {"seconds": whole, "plain_seconds": plain if math.isfinite(plain) else None},
        )


def metrics(record: RolloutRecord, refreshes: bool, several_chains: bool) -> dict[str, float]:
    """Returns TRL's metrics of a rollout, without the prefix `rollout/`.

    Args:
        record: the rollout.
        refreshes: whether a drafter is the policy's quantized copy.
        several_chains: whether rows may have chains of several drafters.
    """
    names = ["seconds", "target_entropy", "tail_seconds", "tail_rounds"]
    logged: dict[str, float | None] = {"tokens_per_second": record.tokens / record.seconds}
    if record.drafted_by:
        names += ["block_efficiency", "acceptance_rate", "first_token_acceptance", "sd_on_fraction"]
        names += ["predicted_speedup", "measured_speedup"]
        logged["draft_length"] = record.mean_draft_length or 0.0
        logged |= {f"block_efficiency_from_{edge}": depth.block_efficiency for edge, depth in record.per_depth.items()}
    if record.drafter_updates is not None:
        names += ["drafter_updates", "drafter_update_seconds"]
    if refreshes:
        logged["drafter_refresh_seconds"] = record.refresh_seconds
    if len(record.rank_seconds) > 1:
        names += ["idle_share", "moved_rows"]
    logged |= {name: getattr(record, name) for name in names}
    if len(record.drafted_by) > 1:
        logged |= {f"drafted_by_{name}": share for name, share in record.drafted_by.items()}
    if several_chains:
        logged |= {f"race_wins_{name}": record.race_wins.get(name, 0) for name in record.drafted_by}
    # TRL averages over a logging window: one rollout without drafts must not make the average NaN.
    return {name: value for name, value in logged.items() if value is not None}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
