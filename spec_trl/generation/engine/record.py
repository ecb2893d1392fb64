"""What a rollout writes down while it runs, and the statistics that are made of it."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, device

from ...scheduling.control import Chain, Control, Tally
from ...scheduling.plain_decoding import plain_rounds
from .counters import DraftCounter, PhaseTimer, RoundLog
from .drafter import Drafter
from .rows import Request, Rows, prompt_key
from .runner import EagerRunner
from .statistics import SpeculationStatistics
from .timeline import TimelineLog


@dataclass(frozen=True)
class Completion:
    """What one request generated: tokens `[n]` int64, EOS included, and their logprobs `[n]` if asked for."""

    tokens: Tensor
    logprobs: Tensor | None


class RolloutRecord:
    """The record of a rollout of `requests` under `strategy`, with drafters of these `names`.

    Attributes:
        rounds: rounds begun.
        tokens_read: prompt tokens read.
        completions: of each request; None: it has not ended here.
        preemptions: see :class:`~spec_trl.generation.engine.statistics.SpeculationStatistics`.
        log, drafts: rounds and their seconds; draft tokens by request, depth and drafter.
    """

    def __init__(self, strategy: str, requests: Sequence[Request], names: Sequence[str], where: device) -> None:
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
        """`requests` have ended: those in `completions` here, the others on another rank, which may go on with them."""
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
