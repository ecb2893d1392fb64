"""What one rollout did, all turns of its tool loop together, summed over ranks."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import torch
from accelerate import Accelerator

from ..generation.drafters.tts.drafter import DistilledDrafter
from ..generation.engine.statistics import DEPTH_EDGES, DraftCounts, RoundPoint, SpeculationStatistics
from ..generation.engine.timeline import RequestTimeline, slowest
from ..scheduling.account import Account
from ..scheduling.control import Control, Tally
from . import run_log
from .run_log import TIMELINES, DepthCounts, RolloutRecord


CURVE_POINTS = 200


@dataclass
class RolloutTotals:
    """Sums over the `generate` calls of one rollout.

    `tallies` and `race_wins` go by strategy. `updates` are those of a drafter that learns while it drafts,
    `update_seconds` the time that decoding stood still for them. `tail_seconds` and `tail_rounds` are those from when
    half of a call's requests had ended on. `plain_seconds` are what plain decoding would have taken, NaN where a call
    does not know. `curve`, `spans`, `points`, `phase_seconds`, `own_rounds`, `timeline` and `account`, of the first
    call, which had all requests, are this rank's own, for the run log.
    """

    turns: int = 0
    requests: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    depths: list[DraftCounts] = field(default_factory=lambda: [DraftCounts() for _ in DEPTH_EDGES])
    tallies: dict[str, Tally] = field(default_factory=dict)
    tokens: int = 0
    logprob_sum: float = 0.0
    rounds: int = 0
    speculative_rounds: int = 0
    draft_length_sum: int = 0
    seconds: float = 0.0
    refresh_seconds: float = 0.0
    updates: int = 0
    update_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    curve: list[tuple[float, int]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    points: list[RoundPoint] = field(default_factory=list)
    own_rounds: int = 0
    race_wins: dict[str, int] = field(default_factory=dict)
    tail_seconds: float = 0.0
    tail_rounds: int = 0
    timeline: list[RequestTimeline] = field(default_factory=list)
    plain_seconds: float = 0.0
    account: Account | None = None

    def add(self, statistics: SpeculationStatistics, control: Control, requests: int, seconds: float) -> None:
        """Adds one `generate` call of `requests` rows that took `seconds`, preparation included."""
        self.curve += [(self.seconds + second, self.requests + done) for second, done in statistics.completion_curve]
        self.spans += [(self.own_rounds + start, draft_length) for start, draft_length in statistics.speculating]
        self.points += statistics.points
        self.timeline += [self._shifted(timeline) for timeline in statistics.timeline]
        tail = statistics.tail()
        self.tail_seconds += tail.seconds
        self.tail_rounds += tail.rounds
        for name, phase in statistics.phase_seconds.items():
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + phase
        if self.account is None:
            self.account = Account(statistics.predicted_speedup, statistics.reason)
        plain = math.nan if statistics.plain_seconds is None else statistics.plain_seconds
        self.plain_seconds += seconds - statistics.seconds + plain
        self.turns += 1
        self.requests += requests
        self.drafts += statistics.total
        self.depths = [
            total + statistics.per_depth.get(edge, DraftCounts())
            for edge, total in zip(DEPTH_EDGES, self.depths, strict=True)
        ]
        for candidate, tally in zip(control.candidates, control.tallies, strict=True):
            self.tallies[candidate.name] = self.tallies.get(candidate.name, Tally()) + tally
        if statistics.racing is not None:
            for name, wins in statistics.racing.wins.items():
                self.race_wins[name] = self.race_wins.get(name, 0) + wins
        self.tokens += statistics.tokens
        self.logprob_sum += statistics.logprob_sum
        if statistics.learning is not None:
            self.updates += statistics.learning.updates
            self.update_seconds += statistics.learning.waited
        self.rounds += statistics.rounds
        self.own_rounds += statistics.rounds
        ends = [start for start, _ in statistics.speculating[1:]] + [statistics.rounds]
        for (start, draft_length), end in zip(statistics.speculating, ends, strict=True):
            self.speculative_rounds += (end - start) * (draft_length > 0)
            self.draft_length_sum += (end - start) * draft_length
        self.seconds += seconds

    def _shifted(self, timeline: RequestTimeline) -> RequestTimeline:
        """That of a call, as part of the rollout: behind the requests, rounds and seconds before it."""
        return RequestTimeline(
            self.requests + timeline.request,
            [(self.seconds + second, self.own_rounds + round_, names) for second, round_, names in timeline.changes],
            self.seconds + timeline.ended,
        )

    def over_ranks(self, accelerator: Accelerator, strategies: Sequence[str]) -> "RolloutTotals":
        """Sums over ranks, of seconds those of the slowest rank, and what is this rank's own as it is.

        Every rank sends the same shapes, whatever its tool loop did.

        Args:
            accelerator: of the run.
            strategies: names of all candidates, the same on all ranks.
        """
        tallies = [self.tallies.get(name, Tally()) for name in strategies]
        scalars = (self.tokens, self.logprob_sum, self.rounds, self.speculative_rounds, self.draft_length_sum)
        counts = (self.requests, self.updates)
        wins = tuple(self.race_wins.get(name, 0) for name in strategies)
        rows = [*map(astuple, (self.drafts, *self.depths)), *map(astuple, tallies), scalars, counts, wins]
        longest = [
            self.seconds, self.refresh_seconds, self.update_seconds, self.tail_seconds, float(self.tail_rounds),
            self.plain_seconds,
        ]  # fmt: skip
        flat = [float(value) for row in rows for value in row] + longest
        packed = torch.tensor(flat, dtype=torch.float64, device=accelerator.device)  # [n]
        every = accelerator.gather(packed[None])  # [ranks, n]
        longest = every[:, -len(longest) :].amax(0).tolist()
        values = iter(every.sum(0).tolist())

        def take(count: int) -> list[Any]:
            return [next(values) for _ in range(count)]

        drafts, *depths = (DraftCounts(*map(int, take(6))) for _ in range(1 + len(DEPTH_EDGES)))
        summed = {name: Tally(*take(len(fields(Tally)))) for name in strategies}
        tokens, logprob_sum, rounds, speculative_rounds, draft_length_sum = take(len(scalars))
        requests, updates = map(int, take(len(counts)))
        race_wins = dict(zip(strategies, map(int, take(len(wins))), strict=True))
        seconds, refresh_seconds, update_seconds, tail_seconds, tail_rounds, plain_seconds = longest
        return RolloutTotals(
            self.turns, requests, drafts, depths, summed, int(tokens), logprob_sum, int(rounds),
            int(speculative_rounds), int(draft_length_sum), seconds, refresh_seconds, updates, update_seconds,
            self.phase_seconds, self.curve, self.spans, self.points, self.own_rounds, race_wins, tail_seconds,
            int(tail_rounds), self.timeline, plain_seconds, self.account,
        )  # fmt: skip

    @property
    def speculation(self) -> Tally:
        """All candidates together."""
        return sum(self.tallies.values(), Tally())

    @property
    def predicted_speedup(self) -> float | None:
        """Over the rounds that drafted; where none did, what kept them from it."""
        predicted = self.speculation.predicted_speedup
        return self.account.predicted_speedup if predicted is None and self.account is not None else predicted

    @property
    def target_entropy(self) -> float:
        """Nats: -log p of the sampled tokens is an unbiased estimate of the entropy they were drawn with."""
        return -self.logprob_sum / self.tokens if self.tokens else math.nan

    @property
    def mean_draft_length(self) -> float:
        """Mean γ of the rounds that speculated; 0 without any."""
        return self.draft_length_sum / self.speculative_rounds if self.speculative_rounds else 0.0

    @property
    def main_drafter(self) -> str | None:
        """What drafted in most rounds; None: nothing did."""
        drafted = {name: tally.rounds for name, tally in self.tallies.items() if tally.rounds}
        return max(drafted, key=drafted.__getitem__, default=None)

    def metrics(self, refreshes: bool, races: bool = False) -> dict[str, float]:
        """For TRL's log, without the `rollout/` before each name. Those of drafting only where drafters are.

        Args:
            refreshes: whether one of them is the policy's quantized copy.
            races: whether rows may race.
        """
        metrics = {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "target_entropy": self.target_entropy,
            "tail_seconds": self.tail_seconds,
            "tail_rounds": self.tail_rounds,
        }
        if not self.tallies:
            return metrics
        metrics |= {
            "block_efficiency": self.drafts.block_efficiency,
            "acceptance_rate": self.drafts.acceptance_rate,
            "first_token_acceptance": self.drafts.first_token_acceptance,
            "draft_length": self.mean_draft_length,
            "sd_on_fraction": self.speculative_rounds / self.rounds,
        }
        if refreshes:
            metrics["drafter_refresh_seconds"] = self.refresh_seconds
        if DistilledDrafter.strategy in self.tallies:
            metrics |= {"drafter_updates": self.updates, "drafter_update_seconds": self.update_seconds}
        if (predicted := self.predicted_speedup) is not None:
            metrics["predicted_speedup"] = predicted
        if (measured := self.speculation.measured_speedup) is not None:
            metrics["measured_speedup"] = measured
        if len(self.tallies) > 1:
            for name, tally in self.tallies.items():
                metrics[f"drafted_by_{name}"] = tally.rounds / self.rounds
        if races:
            metrics |= {f"race_wins_{name}": self.race_wins.get(name, 0) for name in self.tallies}
        for edge, depth in zip(DEPTH_EDGES, self.depths, strict=True):
            if depth.blocks:
                metrics[f"block_efficiency_from_{edge}"] = depth.block_efficiency
        # TRL averages over a logging window: one rollout without drafts must not make the average NaN.
        return {name: value for name, value in metrics.items() if not math.isnan(value)}

    def record(
        self, mode: str, rollout: int, step: int, strategy: str, draft_lengths: dict[str, int]
    ) -> RolloutRecord:
        """For the run log; `draft_lengths` are the γ that were in force, by strategy."""
        main = self.main_drafter
        return RolloutRecord(
            mode=mode,
            rollout=rollout,
            step=step,
            strategy=strategy,
            drafter=main,
            seconds=self.seconds,
            refresh_seconds=self.refresh_seconds,
            tokens=self.tokens,
            requests=self.requests,
            phase_seconds=self.phase_seconds,
            block_efficiency=self.drafts.block_efficiency,
            acceptance_rate=self.drafts.acceptance_rate,
            first_token_acceptance=self.drafts.first_token_acceptance,
            target_entropy=self.target_entropy,
            draft_length=draft_lengths.get(main, 0) if main is not None else max(draft_lengths.values(), default=0),
            mean_draft_length=self.mean_draft_length or None,
            sd_on_fraction=self.speculative_rounds / self.rounds if self.rounds else None,
            predicted_speedup=self.predicted_speedup,
            measured_speedup=self.speculation.measured_speedup,
            reason=None if self.account is None else self.account.reason,
            plain_seconds=None if math.isnan(self.plain_seconds) else self.plain_seconds,
            rounds=self.own_rounds,
            speculating=self.spans,
            completion_curve=_thinned(self.curve),
            per_depth={
                edge: DepthCounts(depth.blocks, depth.committed, depth.drafted, depth.accepted)
                for edge, depth in zip(DEPTH_EDGES, self.depths, strict=True)
                if depth.blocks
            },
            points=[
                run_log.RoundPoint(
                    p.batch, p.length, p.draft_length, p.rounds, p.seconds / p.rounds, p.tokens, p.drafter
                )
                for p in self.points
            ],
            timeline=slowest(self.timeline, TIMELINES),
        )


def _thinned(curve: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most CURVE_POINTS of it, the last one among them."""
    step = -(-len(curve) // CURVE_POINTS)
    return curve[::-step][::-1] if curve else []
