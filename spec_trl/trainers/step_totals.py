"""Sums up a training step: seconds of phases, calls and ranks."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from types import SimpleNamespace
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
    LearningStatistics,
    PlanChange,
    RequestTimeline,
    SpeculationStatistics,
    added,
    slowest,
)
from ..generation.planner.control import Tally
from ..generation.strategies import policy_copies
from .run_log import TIMELINES, Mode, RolloutRecord


CURVE_POINTS = 200
"""Number of logged points of a completion curve."""


class StepClock(TrainerCallback):
    """Splits each optimizer step into the phases of ER Fig. 2a, 6. It synchronizes a GPU at the end of a phase.

    Args:
        on_step: called with (step, seconds, seconds by phase) at the end of a step. Phases are "rollout", "reward",
            "logprobs", "adaptation" (of a learned drafter), "update" (the rest of forward, backward and optimizer) and
            "other" (advantages, logging).
        on_begin: called with the number of earlier optimizer steps where training begins.

    Attributes:
        in_step: whether an optimizer step is under way, with its rollouts.
    """

    def __init__(
        self,
        device: torch.device,
        on_step: Callable[[int, float, dict[str, float]], None],
        on_begin: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._device, self._on_step, self._on_begin = device, on_step, on_begin
        self._seconds: dict[str, float] = {}
        self._open: dict[str, float] = {}
        self._started = 0.0
        self.in_step = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to `name`; "prepare" surrounds all but update and adaptation."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        self._open[name] = self._now()

    def end(self, name: str) -> None:
        """Ends a phase, if started."""
        if name in self._open:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - self._open.pop(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._on_begin(state.global_step)

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


class RolloutSums:
    """Sums over the `generate` calls of one rollout, by field of :class:`RolloutRecord`.

    Attributes:
        turns: number of turns of a tool loop.
        summed: counts; in the log sums over ranks.
        longest: seconds and rounds; in the log those of the slowest rank. `seconds` is without setup; `plain_seconds`
            is infinite if unknown for one of the calls.
        own: in the log those of rank 0. Requests, rounds and seconds of a later call continue the calls before.
        idle_seconds: seconds that this rank waited for other ranks of its pool.
        rank_seconds: seconds of decoding by rank; set by `over_ranks`.
    """

    def __init__(self) -> None:
        self.turns, self.idle_seconds = 0, 0.0
        self.rank_seconds: list[float] = []
        self.summed: dict[str, Any] = {"requests": 0}
        self.longest: dict[str, Any] = {"seconds": 0.0}
        self.own: dict[str, Any] = {"rounds": 0, "explained": []}
        self.add(SpeculationStatistics("", exact=True, plain_seconds=0.0), 0, 0.0)
        self.own["explained"] = []

    def add(
        self, statistics: SpeculationStatistics, requests: int, seconds: float, pool: SharedPool | None = None
    ) -> None:
        """Adds a `generate` call of `requests` rows that took `seconds`, setup included; `pool`: of ranks."""
        seconds -= statistics.setup_seconds
        offset, rounds, done = self.longest["seconds"], self.own["rounds"], self.summed["requests"]
        learning, tail = statistics.learning or LearningStatistics(), statistics.tail()
        plain = statistics.plain_seconds
        rounds_of: dict[str, int] = {}  # by strategy: rounds with its drafts
        for point in statistics.points:
            for name in (point.drafter or "").split("+") if point.draft_length else ():
                rounds_of[name] = rounds_of.get(name, 0) + point.rounds
        summed = {
            "requests": requests, "tokens": statistics.tokens, "logprob_sum": statistics.logprob_sum,
            "all_rounds": statistics.rounds, "drafted_rounds": statistics.drafted_rounds, "rounds_of": rounds_of,
            "draft_length_sum": sum(point.rounds * point.draft_length for point in statistics.points),
            "drafter_updates": learning.updates, "per_depth": statistics.per_depth, "tallies": statistics.tallies,
            "race_wins": {} if statistics.best_of_n is None else statistics.best_of_n.wins,
            "moved_rows": 0 if pool is None else pool.taken_over, "not_exact": dict.fromkeys(_inexact(statistics), 1),
        }  # fmt: skip
        longest = {
            "seconds": seconds, "setup_seconds": statistics.setup_seconds, "refresh_seconds": 0.0,
            "drafter_update_seconds": learning.waited, "tail_seconds": tail.seconds, "tail_rounds": tail.rounds,
            "plain_seconds": math.inf if plain is None else seconds - statistics.seconds + plain,
        }  # fmt: skip
        own = {
            "rounds": statistics.rounds, "phase_seconds": statistics.phase_seconds, "points": statistics.points,
            "speculating": [plan._replace(round=rounds + plan.round) for plan in statistics.speculating],
            "completion_curve": [(offset + second, done + count) for second, count in statistics.completion_curve],
            "timeline": [
                RequestTimeline(
                    done + each.request,
                    [(offset + second, rounds + round_, names) for second, round_, names in each.changes],
                    offset + each.ended,
                )
                for each in statistics.timeline
            ],
            "explained": [(statistics.predicted_speedup, statistics.reason)],
        }  # fmt: skip
        self.summed, self.longest = added(self.summed, summed), added(self.longest, longest)
        self.own = added(self.own, own)
        self.idle_seconds += 0.0 if pool is None else pool.idle_seconds

    def add_refreshes(self, drafters: Iterable[Drafter]) -> None:
        """Adds the seconds of making and requantizing copies of the policy among `drafters` since the last call."""
        for copied in policy_copies(drafters):
            self.longest["refresh_seconds"] += copied.refresh_seconds
            copied.refresh_seconds = 0.0

    def over_ranks(self, strategies: Sequence[str]) -> None:
        """Sums over all ranks, with a tally by strategy for `strategies`. All ranks must call it."""
        ranks = gather_object([(self.summed, self.longest, self.longest["seconds"] - self.idle_seconds)])
        none = {"tallies": {name: Tally() for name in strategies}}
        self.summed = reduce(added, [summed for summed, _, _ in ranks], none)
        self.longest = {name: max(longest[name] for _, longest, _ in ranks) for name in self.longest}
        self.rank_seconds = [seconds for _, _, seconds in ranks]

    def record(
        self, mode: Mode, rollout: int, step: int, strategy: str, draft_lengths: Mapping[str, int]
    ) -> RolloutRecord:
        """Returns the rollout's record for the log; `draft_lengths`: current γ by strategy."""
        summed, own, longest = SimpleNamespace(**self.summed), self.own.copy(), self.longest.copy()
        longest["seconds"] += longest["setup_seconds"]
        longest["plain_seconds"] = longest["plain_seconds"] if math.isfinite(longest["plain_seconds"]) else None
        drafts = sum(summed.per_depth.values(), DraftCounts())
        drafted_by = {name: summed.rounds_of.get(name, 0) / (summed.all_rounds or 1) for name in summed.tallies}
        main = max((name for name in drafted_by if drafted_by[name]), key=drafted_by.__getitem__, default=None)
        speculation = sum(summed.tallies.values(), Tally())
        predicted, reason = next(iter(own.pop("explained")), (None, None))  # of the first call, with all rows
        if speculation.predicted_speedup is not None:  # else the prediction was too low, so nothing was drafted
            predicted = speculation.predicted_speedup
        thin(own["speculating"], MOST_PLANS, 0)
        own["speculating"] = [PlanChange(*plan) for plan in own["speculating"]]
        step_size = -(-len(own["completion_curve"]) // CURVE_POINTS) or 1
        own["completion_curve"] = own["completion_curve"][::-step_size][::-1]  # with its last point
        own["timeline"] = slowest(own["timeline"], TIMELINES)
        return RolloutRecord(
            mode=mode, rollout=rollout, step=step, strategy=strategy, drafter=main, drafted_by=drafted_by,
            block_efficiency=_ratio(drafts.committed, drafts.blocks),
            acceptance_rate=_ratio(drafts.accepted, drafts.drafted),
            first_token_acceptance=_ratio(drafts.first_accepted, drafts.first_drafted),
            # -log p of the sampled tokens is an unbiased estimate of the entropy of the sampling distribution.
            target_entropy=_ratio(-summed.logprob_sum, summed.tokens),
            draft_length=max(draft_lengths.values(), default=0) if main is None else draft_lengths.get(main, 0),
            mean_draft_length=_ratio(summed.draft_length_sum, summed.drafted_rounds),
            sd_on_fraction=summed.drafted_rounds / (summed.all_rounds or 1),
            predicted_speedup=predicted, reason=reason,
            measured_speedup=speculation.measured_speedup if summed.drafted_rounds >= FEWEST_DRAFTED else None,
            tokens=summed.tokens, requests=summed.requests, race_wins=summed.race_wins, moved_rows=summed.moved_rows,
            per_depth=dict(sorted(summed.per_depth.items())),
            drafter_updates=summed.drafter_updates if "tts" in drafted_by else None,
            not_exact=list(summed.not_exact),
            rank_seconds=self.rank_seconds, **own, **longest,
        )  # fmt: skip


def metrics(record: RolloutRecord, refreshes: bool, several_chains: bool) -> dict[str, float]:
    """Returns TRL's metrics of a rollout, without the prefix `rollout/`.

    Args:
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


def _inexact(statistics: SpeculationStatistics) -> list[str]:
    exact = statistics.exact
    return exact if isinstance(exact, list) else [] if exact else ["exactness was not tried"]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
