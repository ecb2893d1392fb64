"""What a rollout writes down while it runs, and the statistics that are made of it."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...scheduling.control import Chain, Control, Tally
from ...scheduling.plain_decoding import plain_rounds
from .drafter import Drafter
from .outcome import Integers
from .rows import Request, Rows, prompt_key
from .runner import EagerRunner
from .statistics import (
    DEPTH_EDGES,
    MOST_CHANGES,
    MOST_PLANS,
    DraftCounts,
    PlanChange,
    RacingStatistics,
    RequestTimeline,
    RoundPoint,
    SpeculationStatistics,
    thin,
)


LENGTH_BIN = 128
"""Rounds whose mean lengths fall into the same bin of this width are one :class:`RoundPoint`."""


@dataclass(frozen=True)
class Completion:
    """What one request generated: tokens `[n]` int64, EOS included, and their logprobs `[n]` if asked for."""

    tokens: Tensor
    logprobs: Tensor | None


class Record:
    """The record of a rollout of `requests` under `strategy`, with drafters of these `names`.

    Attributes:
        rounds: rounds begun.
        tokens_read: prompt tokens read.
        completions: of each request; None: it has not ended here.
        preemptions: see :class:`~spec_trl.generation.engine.statistics.SpeculationStatistics`.
        log, drafts: rounds and their seconds; draft tokens by request, depth and drafter.
    """

    def __init__(self, strategy: str, requests: Sequence[Request], names: Sequence[str], where: torch.device) -> None:
        self.rounds = self.tokens_read = self.preemptions = 0
        self.completions: list[Completion | None] = [None] * len(requests)
        self.prompt_keys = [prompt_key(request.prompt) for request in requests]
        self.log, self.drafts = RoundLog(), DraftCounter(len(requests), names)
        self._strategy, self._requests = strategy, requests
        self._timeline, self._timer = TimelineLog(len(requests), names), PhaseTimer(where)
        self._ended_in, self._curve = [-1] * len(requests), list[tuple[float, int]]()

    def begin(self) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._started

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to the phase `name`."""
        return self._timer.phase(name)

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        return self._timer.seconds()

    def plan(self, plan: Sequence[Chain], requests: Sequence[int]) -> None:
        """A round, or the first token, of the rows that hold `requests` begins, with the chains of `plan`."""
        self._timeline.record(self.seconds, self.rounds, plan, requests)

    def end(self, requests: Sequence[int], completions: dict[int, Completion]) -> None:
        """`requests` have ended: those in `completions` here, the others on another rank, or they go on there."""
        seconds = self.seconds
        for index, completion in completions.items():
            self.completions[index] = completion
            self._ended_in[index] = self.rounds
        if completions:
            self._curve.append((seconds, sum(completion is not None for completion in self.completions)))
        self._timeline.end(requests, seconds)

    def statistics(
        self, target: EagerRunner, rows: Rows, drafters: Sequence[Drafter], control: Control
    ) -> SpeculationStatistics:
        """The statistics of the whole rollout."""
        statistics = SpeculationStatistics(self._strategy)
        completions = [completion for completion in self.completions if completion is not None]
        self.drafts.write_to(statistics)
        self.log.write_to(statistics)
        statistics.ended_in = [ended for ended in self._ended_in if ended >= 0]
        statistics.completion_curve, statistics.preemptions = self._curve, self.preemptions
        statistics.timeline = [timeline for timeline in self._timeline.timelines if timeline.changes]
        lengths = [len(completion.tokens) for completion in completions]
        statistics.tokens = sum(lengths)
        logprobs = [completion.logprobs for completion in completions if completion.logprobs is not None]
        statistics.logprob_sum = float(sum(of_row.double().sum() for of_row in logprobs))
        statistics.target_forwards = target.forwards
        most = [length + control.most_drafted for length in rows.most]
        statistics.cache_bytes = target.cache.bytes_of(most)
        statistics.graphs, statistics.graph_bytes = target.captured
        for drafter in drafters:
            statistics.draft_forwards += drafter.forwards
            statistics.cache_bytes += drafter.cache_bytes
            if drafter.learns:
                statistics.learning = drafter.learning
        account = control.account()
        statistics.predicted_speedup, statistics.reason = account.predicted_speedup, account.reason
        statistics.measured_speedup = sum(control.tallies, Tally()).measured_speedup
        statistics.phase_seconds, statistics.seconds = self.phase_seconds(), self.seconds
        statistics.plain_seconds = self._plain_seconds(statistics, rows.capacity, control)
        return statistics

    def _plain_seconds(self, statistics: SpeculationStatistics, capacity: int, control: Control) -> float | None:
        """What plain decoding would have taken: the same prefill, the rounds before the first draft, and the rest."""
        log = self.log
        if log.plain_rounds == log.rounds:
            return statistics.seconds
        ended = [(request, self.completions[request.index]) for request in self._requests]
        counts = [len(completion.tokens) - 1 for _, completion in ended if completion is not None]
        begun = [
            (len(request.prompt) + 1, self.prompt_keys[request.index])
            for request, completion in ended
            if completion is not None
        ]
        rest = control.plain_seconds(plain_rounds(begun, counts, capacity, log.plain_rounds))
        return None if rest is None else statistics.phase_seconds["prefill"] + log.plain_seconds + rest


class RoundLog:
    """Collects the shapes and times of rounds; `plain_...` are of those before the first one that drafted."""

    def __init__(self) -> None:
        self._points: dict[tuple[int, int, int, str | None], RoundPoint] = {}
        self._plans: list[tuple[int, int, int, str | None]] = []  # see `PlanChange`
        self.rounds, self.plain_rounds, self.plain_seconds = 0, 0, 0.0

    def add(
        self, batch: int, length: float, draft_length: int, drafter: str | None, seconds: float, tokens: int
    ) -> None:
        """Adds one round; see :class:`RoundPoint`."""
        plan = draft_length, batch, drafter
        if not self._plans or self._plans[-1][1:] != plan:
            self._plans.append((self.rounds, *plan))
            thin(self._plans, MOST_PLANS, 0)
        if not draft_length and self.plain_rounds == self.rounds:
            self.plain_rounds += 1
            self.plain_seconds += seconds
        self.rounds += 1
        key = (batch, int(length) // LENGTH_BIN, draft_length, drafter)
        point = self._points.setdefault(key, RoundPoint(batch, 0.0, draft_length, drafter))
        point.rounds += 1
        point.length += (length - point.length) / point.rounds
        point.seconds += seconds
        point.tokens += tokens

    def write_to(self, statistics: SpeculationStatistics) -> None:
        """Fills in `rounds`, `speculating` and `points`."""
        statistics.rounds, statistics.points = self.rounds, self.points
        statistics.speculating = [PlanChange(*plan) for plan in self._plans]

    @property
    def points(self) -> list[RoundPoint]:
        """What the rounds took so far."""
        return list(self._points.values())


class DraftCounter:
    """Counts drafts of `requests` rows. Drafters of one name are counted together."""

    def __init__(self, requests: int, names: Sequence[str]) -> None:
        def zeros(*shape: int) -> Integers:
            return np.zeros(shape, np.int64)

        self._names = list(dict.fromkeys(names))
        self._name_of = np.array([self._names.index(name) for name in names], np.int64)
        drafters, depths = len(self._names), len(DEPTH_EDGES)
        # Columns in the order of DraftCounts.
        self._of_request, self._of_depth, self._of_drafter = zeros(requests, 6), zeros(depths, 6), zeros(drafters, 6)
        self._races = 0
        self._raced = zeros(drafters, 2)  # columns: chains in races, wasted tokens
        self._won, self._won_at_depth = zeros(requests, drafters), zeros(depths, drafters)

    def add(
        self,
        requests: Sequence[int],
        depths: Integers,
        owners: Sequence[Sequence[int]],
        drafted: Integers,
        accepted: Integers,
        kept: Integers,
        winner: Integers,
    ) -> None:
        """Adds one round that drafted for `requests` at the generated positions `depths`, and committed `kept` tokens
        of the lanes `winner` (B numbers each).

        In each lane a row has a chain of one of the drafters `owners`, -1 where it has none, of which `drafted` tokens
        up to the row's end were verified and `accepted` accepted (`[N, B]` each).
        """
        ones, rows = np.ones_like(drafted), np.arange(len(kept))
        columns = [drafted, accepted, ones, drafted.clip(max=1), accepted.clip(max=1)]
        counts = np.stack([*columns, np.minimum(accepted + 1, kept)], axis=-1)  # [N, B, 6]
        drafters = np.array(owners)  # [N, B]
        bins = np.searchsorted(DEPTH_EDGES, depths, side="right") - 1  # [B]
        taken = counts[winner, rows]  # [B, 6]
        self._of_request[requests] += taken
        np.add.at(self._of_depth, bins, taken)
        lane, row = (drafters >= 0).nonzero()  # of each chain
        names = self._name_of[drafters[lane, row]]
        np.add.at(self._of_drafter, names, counts[lane, row])
        if len(drafters) == 1:
            return
        self._races += 1
        is_raced = (drafters >= 0).sum(0)[row] > 1
        lane, row, names = lane[is_raced], row[is_raced], names[is_raced]
        won = winner[row] == lane
        wasted = drafted[lane, row] - accepted[lane, row] * won
        np.add.at(self._raced, names, np.stack([np.ones_like(wasted), wasted], axis=-1))
        np.add.at(self._won, (np.array(requests)[row], names), won)
        np.add.at(self._won_at_depth, (bins[row], names), won)

    def write_to(self, statistics: SpeculationStatistics) -> None:
        """Fills in `total`, `per_request`, `per_depth`, `per_drafter` and `racing`."""

        def counts(rows: Integers) -> list[DraftCounts]:
            return [DraftCounts(*row) for row in rows.tolist()]

        def by_name(values: Integers) -> dict[str, int]:
            return dict(zip(self._names, values.tolist(), strict=True))

        statistics.per_request = counts(self._of_request)
        statistics.total = sum(statistics.per_request, DraftCounts())
        by_depth = zip(DEPTH_EDGES, counts(self._of_depth), strict=True)
        statistics.per_depth = {edge: found for edge, found in by_depth if found.blocks}
        statistics.per_drafter = dict(zip(self._names, counts(self._of_drafter), strict=True))
        if self._races:
            chains, wasted = self._raced.T  # [drafters] each
            wins = self._won.sum(0)  # [drafters]
            won_at_depth = zip(DEPTH_EDGES, self._won_at_depth, strict=True)
            statistics.racing = RacingStatistics(
                self._races,
                by_name(wins),
                by_name(chains - wins),
                by_name(wasted),
                [by_name(won) for won in self._won],
                {edge: by_name(won) for edge, won in won_at_depth if won.any()},
            )


class PhaseTimer:
    """Seconds per phase on `device`. On CUDA it times by events, so that the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()  # not added yet

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`."""
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            while self._events and self._events[0][2].query():  # of earlier rounds: few stay
                self._add_oldest()
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        if self._events:
            torch.cuda.synchronize()
        while self._events:
            self._add_oldest()
        return dict(self._seconds)

    def _add_oldest(self) -> None:
        name, start, end = self._events.popleft()
        self._seconds[name] += start.elapsed_time(end) / 1e3


class TimelineLog:
    """Collects timelines of `requests` rows of the caller's batch, with the `names` of the drafters."""

    def __init__(self, requests: int, names: Sequence[str]) -> None:
        self.timelines = [RequestTimeline(request) for request in range(requests)]
        self._names = names
        self._chains: list[tuple[int, tuple[int, ...] | None]] = []
        self._requests: list[int] = []

    def record(self, seconds: float, round_: int, plan: Sequence[Chain], requests: Sequence[int]) -> None:
        """A round begins, of the chains of `plan` for the rows that hold `requests`."""
        chains = [(chain.which, chain.rows) for chain in plan]
        if chains == self._chains and requests == self._requests:  # most rounds cost no more than this
            return
        self._chains, self._requests = chains, list(requests)
        drafters: list[list[str]] = [[] for _ in requests]
        for which, rows in chains:
            for row in range(len(requests)) if rows is None else rows:
                if self._names[which] not in drafters[row]:
                    drafters[row].append(self._names[which])
        for request, own in zip(requests, drafters, strict=True):
            changes = self.timelines[request].changes
            if not changes or changes[-1][2] != own:
                changes.append((seconds, round_, own))
                thin(changes, MOST_CHANGES, 1)

    def end(self, requests: Sequence[int], seconds: float) -> None:
        """`requests` ended."""
        for request in requests:
            self.timelines[request].ended = seconds
