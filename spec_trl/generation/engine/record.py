"""The record of a rollout: a :class:`Round` per decoding round, from which statistics are computed at the end."""

import time
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..planner.admission import PlainRounds, plain_rounds
from ..planner.control import Chain, Control, Tally
from .drafter import Drafter
from .forwards.runner import EagerRunner
from .rows import Request, Rows, prompt_key
from .sampling.accept import Integers
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
    plain_seconds_within,
)


LENGTH_BIN = 128
"""Width of bins: rounds with mean lengths in the same bin are one :class:`RoundPoint`."""
ROUNDS_AT_ONCE = 128
"""Number of rounds whose drafts are counted together: a bound on memory."""


@dataclass(frozen=True)
class Completion:
    """Output of one request: tokens `[n]` int64, EOS included, and their logprobs `[n]` if requested."""

    tokens: Tensor
    logprobs: Tensor | None


@dataclass(frozen=True)
class DraftedChains:
    """The verified chains of a round. In each of N lanes a row has at most one chain.

    Args:
        depths: `[B]` int32, generated tokens by row before the round. All others are int16.
        owners: `[N, B]`: the drafter of the chain, -1: no chain.
        drafted, accepted: `[N, B]` tokens of each chain, up to the row's end.
        committed: `[B]` committed tokens.
        winner: `[B]`, lane of the winning chain.
    """

    depths: NDArray[np.int32]
    owners: NDArray[np.int16]
    drafted: NDArray[np.int16]
    accepted: NDArray[np.int16]
    committed: NDArray[np.int16]
    winner: NDArray[np.int16]

    @classmethod
    def of(cls, depths: Integers, *rest: Any) -> "DraftedChains":
        """Takes values of any integer dtype. A long rollout has thousands of rounds: 14 bytes for each row of one."""
        return cls(depths.astype(np.int32), *(np.asarray(values, np.int16) for values in rest))


@dataclass
class Round:
    """One decoding round.

    Args:
        began: seconds since the rollout began.
        requests: the requests of the B rows.
        length: mean cached tokens per row.
        plan: the chains to draft.
        draft_length: most draft tokens verified in any row; in a race over all its chains.
        seconds: of the round, without learning.
        tokens: committed, over all rows.
        chains: None: nothing was drafted.
    """

    began: float
    requests: list[int]
    length: float
    plan: Sequence[Chain]
    draft_length: int = 0
    seconds: float = 0.0
    tokens: int = 0
    chains: DraftedChains | None = None


def on_host(completions: Sequence[Completion]) -> list[Completion]:
    """Copies `completions` to the host, all in one copy of their tokens and one of their logprobs."""
    counts = [len(done.tokens) for done in completions]
    logprobs = [done.logprobs for done in completions if done.logprobs is not None]
    if not completions:
        return []
    tokens = torch.cat([done.tokens for done in completions]).cpu().split(counts)
    scores = torch.cat(logprobs).cpu().split(counts) if logprobs else [None] * len(counts)
    return [Completion(*each) for each in zip(tokens, scores, strict=True)]


class PhaseTimer:
    """Seconds by phase on `device`. On CUDA it uses events, so that the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
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
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        if self._events:
            torch.cuda.synchronize()
        while self._events:
            self._add_oldest()
        return dict(self._seconds)

    def _add_oldest(self) -> None:
        name, start, end = self._events.popleft()
        self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3


class Record:
    """The record of a rollout of `requests` under `strategy`, whose drafters have these `names`. Its clock starts when
    it is made.

    Attributes:
        rounds: decoding rounds; the last one may be unfinished.
        tokens_read: prompt tokens read.
        completions: by request; None: it has not ended on this rank.
        preemptions: see :class:`~.SpeculationStatistics`.
        phase, phase_seconds: as of :class:`PhaseTimer`.
    """

    def __init__(self, strategy: str, requests: Sequence[Request], names: Sequence[str], where: torch.device) -> None:
        self.rounds: list[Round] = []
        self.tokens_read = self.preemptions = 0
        self.completions: list[Completion | None] = [None] * len(requests)
        self.prompt_keys = [prompt_key(request.prompt) for request in requests]
        timer = PhaseTimer(where)
        self.phase, self.phase_seconds = timer.phase, timer.seconds
        self._strategy, self._requests, self._names = strategy, requests, names
        self._ends: dict[int, tuple[float, int]] = {}  # by request: seconds, rounds that had begun
        self._started = time.perf_counter()

    def begin_round(self, plan: Sequence[Chain], requests: list[int], length: float) -> Round:
        """Adds a round of the rows that hold `requests`; its results are filled in later."""
        if self.rounds and self.rounds[-1].requests == requests:
            requests = self.rounds[-1].requests  # one list for many rounds
        else:
            requests = list(requests)
        self.rounds.append(Round(time.perf_counter() - self._started, requests, length, plan))
        return self.rounds[-1]

    def end(self, requests: Sequence[int], completions: Mapping[int, Completion]) -> None:
        """Records that `requests` have left: those in `completions` have ended here; others end on another rank."""
        self._ends.update(dict.fromkeys(requests, (time.perf_counter() - self._started, len(self.rounds))))
        for index, completion in completions.items():
            self.completions[index] = completion

    def statistics(
        self, target: EagerRunner, rows: Rows, drafters: Sequence[Drafter], control: Control
    ) -> SpeculationStatistics:
        """The statistics of the whole rollout."""
        completed = {index: done for index, done in enumerate(self.completions) if done is not None}
        completed = dict(zip(completed, on_host([*completed.values()]), strict=True))
        for index, done in completed.items():
            self.completions[index] = done
        explanation = control.explain()
        statistics = SpeculationStatistics(
            self._strategy,
            target_forwards=target.forwards,
            rounds=len(self.rounds),
            ended_in=[self._ends[index][1] for index in completed],
            timeline=timelines(self.rounds, self._names, self._ends, completed),
            predicted_speedup=explanation.predicted_speedup,
            measured_speedup=sum(control.tallies, Tally()).measured_speedup,
            tallies=dict(zip((candidate.name for candidate in control.candidates), control.tallies, strict=True)),
            reason=explanation.reason,
            cache_bytes=target.cache.bytes_of([length + control.most_drafted for length in rows.most]),
            preemptions=self.preemptions,
            tokens_read=self.tokens_read,
        )
        statistics.points, statistics.speculating = points_and_plans(self.rounds, self._names)
        count_drafts(statistics, self.rounds, len(self.completions), self._names)
        statistics.graphs, statistics.graph_bytes = target.captured
        for completion in completed.values():
            statistics.tokens += len(completion.tokens)
            if completion.logprobs is not None:
                statistics.logprob_sum += float(completion.logprobs.double().sum())
        for finished, seconds in enumerate(sorted([self._ends[index][0] for index in completed]), start=1):
            if statistics.completion_curve and statistics.completion_curve[-1][0] == seconds:
                statistics.completion_curve.pop()
            statistics.completion_curve.append((seconds, finished))
        for drafter in drafters:
            statistics.draft_forwards += drafter.forwards
            statistics.cache_bytes += drafter.cache_bytes
            if drafter.learns:
                statistics.learning = drafter.learning
        statistics.phase_seconds = self.phase_seconds()
        statistics.seconds = time.perf_counter() - self._started
        statistics.plain_seconds = self.plain_seconds(statistics, completed, rows.capacity, control)
        return statistics

    def plain_seconds(
        self, statistics: SpeculationStatistics, completed: Mapping[int, Completion], capacity: int, control: Control
    ) -> float | None:
        """Estimates plain decoding: the same prefill, the rounds before the first draft, and the remaining rounds,
        within what the rounds that drafted can have saved."""
        prefill = statistics.phase_seconds.get("prefill", 0.0)  # this rank may decode nothing
        plain, seconds = 0, prefill
        while plain < len(self.rounds) and not self.rounds[plain].draft_length:
            seconds += self.rounds[plain].seconds
            plain += 1
        if plain == len(self.rounds):
            return statistics.seconds
        begun, counts = [], []
        for request in self._requests:
            if request.index in completed:
                begun.append((len(request.prompt) + 1, self.prompt_keys[request.index]))
                counts.append(len(completed[request.index].tokens) - 1)
        rest = control.plain_seconds(plain_rounds(begun, counts, capacity, plain))
        drafted = [point for point in statistics.points if point.draft_length]
        least, most = (
            control.plain_seconds([PlainRounds(count(point), point.batch, point.length) for point in drafted])
            for count in (lambda point: point.rounds, lambda point: point.tokens / point.batch)
        )
        if rest is None or least is None or most is None:
            return None
        if statistics.measured_speedup is not None:  # of the same rounds, by what was expected when each began
            most = min(most, statistics.measured_speedup * sum(point.seconds for point in drafted))
        common = prefill + sum(point.seconds for point in statistics.points if not point.draft_length)
        return plain_seconds_within(seconds + rest, common, least, most)


# ---- statistics of rounds -------------------------------------------------------------------------------------------


def points_and_plans(rounds: Sequence[Round], names: Sequence[str]) -> tuple[list[RoundPoint], list[PlanChange]]:
    """Sums up rounds of similar shape, and finds changes of the plan; `names`: of the drafters."""
    points: dict[tuple[int, int, int, str | None], RoundPoint] = {}
    plans: list[Any] = []
    for number, round_ in enumerate(rounds):
        batch, drafters = len(round_.requests), dict[str, None]()
        for chain in round_.plan:
            if chain.rows != ():
                drafters[names[chain.which]] = None
        drafter = "+".join(drafters) if round_.draft_length else None
        if not plans or plans[-1][1:] != (round_.draft_length, batch, drafter):
            plans.append((number, round_.draft_length, batch, drafter))
            thin(plans, MOST_PLANS, 0)
        key = batch, int(round_.length) // LENGTH_BIN, round_.draft_length, drafter
        point = points.setdefault(key, RoundPoint(batch, 0.0, round_.draft_length, drafter))
        point.rounds += 1
        point.length += (round_.length - point.length) / point.rounds
        point.seconds += round_.seconds
        point.tokens += round_.tokens
    return list(points.values()), [*starmap(PlanChange, plans)]


def timelines(
    rounds: Sequence[Round], names: Sequence[str], ends: Mapping[int, tuple[float, int]], completed: Container[int]
) -> list[RequestTimeline]:
    """Timelines: who drafted for a request in which round, by request.

    Args:
        rounds: of the rollout.
        names: of the drafters.
        ends: by request: seconds, and rounds that had begun.
        completed: the requests that ended here. A request without rounds ended with its first token.
    """
    by_request: dict[int, RequestTimeline] = {}
    before: Any = None
    for number, round_ in enumerate(rounds):
        chains = [(chain.which, chain.rows) for chain in round_.plan]
        if (chains, round_.requests) == before:  # most rounds cost no more than this
            continue
        before = chains, round_.requests
        drafters: list[list[str]] = [[] for _ in round_.requests]
        for which, rows in chains:
            for row in range(len(drafters)) if rows is None else rows:
                if names[which] not in drafters[row]:
                    drafters[row].append(names[which])
        for request, drafting in zip(round_.requests, drafters, strict=True):
            changes = by_request.setdefault(request, RequestTimeline(request)).changes
            if not changes or changes[-1][2] != drafting:
                changes.append((round_.began, number, drafting))
                thin(changes, MOST_CHANGES, 1)
    for request, (seconds, begun) in ends.items():
        if request in completed:
            by_request.setdefault(request, RequestTimeline(request, [(seconds, begun, [])]))
        if request in by_request:
            by_request[request].ended = seconds
    return [by_request[request] for request in sorted(by_request)]


def count_drafts(
    statistics: SpeculationStatistics, rounds: Sequence[Round], requests: int, names: Sequence[str]
) -> None:
    """Fills in `total`, `per_request`, `per_depth`, `per_drafter` and `racing`, for a batch of `requests` requests.
    Drafters with the same name are counted together."""
    labels = list(dict.fromkeys(names))
    label_of = np.array([labels.index(name) for name in names], np.int64)
    # Columns in the order of DraftCounts.
    of_request = np.zeros((requests, 6), np.int64)
    of_depth, of_drafter = np.zeros((len(DEPTH_EDGES), 6), np.int64), np.zeros((len(labels), 6), np.int64)
    chains_and_wasted = np.zeros((len(labels), 2), np.int64)  # in races
    won = np.zeros((requests, len(labels)), np.int64)
    won_at_depth = np.zeros((len(DEPTH_EDGES), len(labels)), np.int64)
    races, by_lanes = 0, dict[int, list[Round]]()
    for round_ in rounds:
        if round_.chains is not None:
            by_lanes.setdefault(len(round_.chains.owners), []).append(round_)
    for lanes, like in by_lanes.items():
        for start in range(0, len(like), ROUNDS_AT_ONCE):
            some = like[start : start + ROUNDS_AT_ONCE]
            parts = [vars(round_.chains) for round_ in some]
            # M rows of several rounds at once. owners, drafted, accepted: [N, M]; depths, committed, winner: [M]
            depths, owners, drafted, accepted, committed, winner = [
                np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]
            ]
            request = np.concatenate([round_.requests for round_ in some])  # [M]
            ones = np.broadcast_to(committed > 0, drafted.shape)  # a row in step that had ended takes no token
            columns = [drafted, accepted, ones, drafted.clip(max=1), accepted.clip(max=1)]
            counts = np.stack([*columns, np.minimum(accepted + 1, committed)], axis=-1)  # [N, M, 6]
            taken = counts[winner, np.arange(len(winner))]  # [M, 6]
            depth = np.searchsorted(DEPTH_EDGES, depths, side="right") - 1  # [M]
            np.add.at(of_request, request, taken)
            np.add.at(of_depth, depth, taken)
            lane, row = (owners >= 0).nonzero()  # of each chain
            label = label_of[owners[lane, row]]
            np.add.at(of_drafter, label, counts[lane, row])
            if lanes == 1:
                continue
            races += len(some)
            raced = (owners >= 0).sum(0)[row] > 1
            lane, row, label = lane[raced], row[raced], label[raced]
            wins = winner[row] == lane
            wasted = drafted[lane, row] - accepted[lane, row] * wins
            np.add.at(chains_and_wasted, label, np.stack([np.ones_like(wasted), wasted], axis=-1))
            np.add.at(won, (request[row], label), wins)
            np.add.at(won_at_depth, (depth[row], label), wins)

    def by_name(values: Integers) -> dict[str, int]:
        return dict(zip(labels, values.tolist(), strict=True))

    statistics.per_request = [*starmap(DraftCounts, of_request.tolist())]
    statistics.total = DraftCounts(*of_request.sum(0).tolist())
    for edge, counts_at in zip(DEPTH_EDGES, of_depth.tolist(), strict=True):
        if any(counts_at):
            statistics.per_depth[edge] = DraftCounts(*counts_at)
    statistics.per_drafter = dict(zip(labels, starmap(DraftCounts, of_drafter.tolist()), strict=True))
    if races:
        chains, wasted = chains_and_wasted.T  # [drafters] each
        won_at_edge = zip(DEPTH_EDGES, won_at_depth, strict=True)
        statistics.racing = RacingStatistics(
            races,
            by_name(won.sum(0)),
            by_name(chains - won.sum(0)),
            by_name(wasted),
            [by_name(row) for row in won],
            {edge: by_name(row) for edge, row in won_at_edge if row.any()},
        )


def thin(changes: list[Any], most: int, when: int) -> None:
    """Merges the two shortest neighbouring spans until `most` of `changes` remain. The open span is never merged. The
    field `when` of a change is its round; the fields after it are what changed."""
    while len(changes) > most:
        at = min(range(1, len(changes) - 1), key=lambda at: changes[at + 1][when] - changes[at - 1][when])
        one, other, ended = changes[at - 1 : at + 2]
        longer = one if 2 * other[when] >= one[when] + ended[when] else other
        changes[at - 1 : at + 1] = [(*one[: when + 1], *longer[when + 1 :])]
        for place in (at, at - 1):
            if place and changes[place][when + 1 :] == changes[place - 1][when + 1 :]:
                del changes[place]
