"""Records a rollout by :class:`Round`, and computes statistics from them at the end."""

import time
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..planner.control import Chain, Control, PlainRounds, Tally, plain_rounds
from .drafter import Drafter
from .forwards.runner import EagerRunner
from .kv.memory import sent
from .rows import Integers, Request, Rows, prompt_key
from .sampling.support import pack
from .statistics import (
    DEPTH_EDGES,
    MOST_CHANGES,
    MOST_PLANS,
    DraftCounts,
    PlanChange,
    RequestTimeline,
    RoundPoint,
    SpeculationStatistics,
    plain_seconds_within,
)


LENGTH_BIN = 128
"""Tokens: rounds with mean lengths in the same bin are one :class:`RoundPoint`."""
ROUNDS_AT_ONCE = 128
"""Rounds counted together: a bound on memory."""


@dataclass(frozen=True)
class Completion:
    """Output of one request: tokens `[n]` int64, EOS included, and if requested their logprobs `[n]` and supports `[n,
    bytes]` (:func:`~.support.pack`), these on the host."""

    tokens: Tensor
    logprobs: Tensor | None
    support: Tensor | None = None


@dataclass(frozen=True)
class DraftedChains:
    """The verified chains of a round, `[B]` each.

    Args:
        depths: int32, generated tokens by row before the round. All others are int16.
        owners: the drafter of the row's chain, -1: no chain.
        drafted, accepted: tokens of the chain, up to the row's end.
    """

    depths: NDArray[np.int32]
    owners: NDArray[np.int16]
    drafted: NDArray[np.int16]
    accepted: NDArray[np.int16]
    committed: NDArray[np.int16]

    @classmethod
    def of(cls, depths: Integers, *rest: Any) -> "DraftedChains":
        """Takes values of any integer dtype. A long rollout has thousands of rounds: 12 bytes for each row of one."""
        return cls(depths.astype(np.int32), *(np.asarray(values, np.int16) for values in rest))


@dataclass
class Round:
    """One decoding round.

    Args:
        began: seconds since the rollout began.
        requests: the requests of the B rows.
        length: mean cached tokens per row.
        draft_length: most draft tokens verified in any row, over all its chains.
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
    """Copies `completions` to the host in two copies: tokens, and logprobs."""
    counts = [len(done.tokens) for done in completions]
    logprobs = [done.logprobs for done in completions if done.logprobs is not None]
    if not completions:
        return []
    tokens = torch.cat([done.tokens for done in completions]).cpu().split(counts)
    scores = torch.cat(logprobs).cpu().split(counts) if logprobs else [None] * len(counts)
    supports = [done.support for done in completions]
    return [Completion(*each) for each in zip(tokens, scores, supports, strict=True)]


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
        """Seconds by phase so far."""
        if self._events:
            torch.cuda.synchronize()
        while self._events:
            self._add_oldest()
        return dict(self._seconds)

    def _add_oldest(self) -> None:
        name, start, end = self._events.popleft()
        self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3


class Record:
    """The record of a rollout of `requests` under `strategy`, with drafters of these `names`. Its clock starts at
    construction.

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
        self._ends: dict[int, tuple[float, int]] = {}  # by request: seconds, rounds that had started
        self._supports: dict[int, list[Tensor]] = {}  # by request that has not ended: of its tokens, in order
        self._started = time.perf_counter()

    def begin_round(self, plan: Sequence[Chain], requests: list[int], length: float) -> Round:
        """Adds a round of the rows that hold `requests`; its results are filled in later."""
        if self.rounds and self.rounds[-1].requests == requests:
            requests = self.rounds[-1].requests  # one list for many rounds
        else:
            requests = list(requests)
        self.rounds.append(Round(time.perf_counter() - self._started, requests, length, plan))
        return self.rounds[-1]

    def keep_support(self, requests: Sequence[int], kept: Tensor, counts: Integers) -> None:
        """Stores the support of the first `counts` `[B]` tokens of `requests`: `kept`, `[B, n, vocabulary]` bool."""
        taken = sent(torch.from_numpy(np.arange(kept.shape[1]) < counts[:, None]), kept.device)  # [B, n]
        packed = pack(kept[taken]).cpu().split(counts.tolist())  # [count, bytes] each
        for request, part in zip(requests, packed, strict=True):
            if len(part):
                self._supports.setdefault(request, []).append(part)

    def end(self, requests: Sequence[int], completions: Mapping[int, Completion]) -> None:
        """Records that `requests` have left: those in `completions` ended here, others end on another rank."""
        self._ends.update(dict.fromkeys(requests, (time.perf_counter() - self._started, len(self.rounds))))
        for index, completion in completions.items():
            parts = self._supports.pop(index, None)
            self.completions[index] = completion if parts is None else replace(completion, support=torch.cat(parts))

    def statistics(
        self, target: EagerRunner, rows: Rows, drafters: Sequence[Drafter], control: Control
    ) -> SpeculationStatistics:
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
        within the possible savings of drafted rounds."""
        prefill = statistics.phase_seconds.get("prefill", 0.0)  # this rank may decode nothing
        plain, seconds = 0, prefill
        while plain < len(self.rounds) and not self.rounds[plain].draft_length:
            seconds += self.rounds[plain].seconds
            plain += 1
        if plain == len(self.rounds):
            return statistics.seconds
        lengths, counts = [], []
        for request in self._requests:
            if request.index in completed:
                lengths.append((len(request.prompt) + 1, self.prompt_keys[request.index]))
                counts.append(len(completed[request.index].tokens) - 1)
        rest = control.plain_seconds(plain_rounds(lengths, counts, capacity, plain))
        drafted = [point for point in statistics.points if point.draft_length]
        least = control.plain_seconds([PlainRounds(each.rounds, each.batch, each.length) for each in drafted])
        all_kept = [PlainRounds(each.tokens / each.batch, each.batch, each.length) for each in drafted]
        most = control.plain_seconds(all_kept)
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
                drafters[names[chain.drafter]] = None
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
    """Finds, by request, the drafters by round.

    Args:
        rounds, names: of the rollout, and of the drafters.
        ends: by request: seconds, and rounds before its end.
        completed: requests that ended here. One without rounds ended with its first token.
    """
    by_request: dict[int, RequestTimeline] = {}
    before: Any = None
    for number, round_ in enumerate(rounds):
        chains = [(chain.drafter, chain.rows) for chain in round_.plan]
        if (chains, round_.requests) == before:  # most rounds cost no more than this
            continue
        before = chains, round_.requests
        drafters: list[list[str]] = [[] for _ in round_.requests]
        for drafter, rows in chains:
            for row in range(len(drafters)) if rows is None else rows:
                if names[drafter] not in drafters[row]:
                    drafters[row].append(names[drafter])
        for request, drafting in zip(round_.requests, drafters, strict=True):
            changes = by_request.setdefault(request, RequestTimeline(request)).changes
            if not changes or changes[-1][2] != drafting:
                changes.append((round_.began, number, drafting))
                thin(changes, MOST_CHANGES, 1)
    for request, (seconds, started) in ends.items():
        if request in completed:
            by_request.setdefault(request, RequestTimeline(request, [(seconds, started, [])]))
        if request in by_request:
            by_request[request].ended = seconds
    return [by_request[request] for request in sorted(by_request)]


def count_drafts(
    statistics: SpeculationStatistics, rounds: Sequence[Round], requests: int, names: Sequence[str]
) -> None:
    """Fills in `total`, `per_request`, `per_depth` and `per_drafter` for a batch of `requests` requests, and counts
    further chains. Drafters of one name are counted together."""
    labels = list(dict.fromkeys(names))
    label_of = np.array([labels.index(name) for name in names], np.int64)
    # Columns in the order of DraftCounts.
    of_request = np.zeros((requests, 6), np.int64)
    of_depth, of_drafter = np.zeros((len(DEPTH_EDGES), 6), np.int64), np.zeros((len(labels), 6), np.int64)
    with_chains, kinds = list[tuple[list[int], DraftedChains]](), set[Any]()
    for round_ in rounds:
        if round_.chains is not None:
            with_chains.append((round_.requests, round_.chains))
            kinds.add(type(round_.chains))
    for start in range(0, len(with_chains), ROUNDS_AT_ONCE):
        some = with_chains[start : start + ROUNDS_AT_ONCE]
        # M rows of several rounds at once, [M] each
        request = np.concatenate([own for own, _ in some])
        depths, owners, drafted, accepted, committed = (
            np.concatenate([getattr(chains, each.name) for _, chains in some]) for each in fields(DraftedChains)
        )
        counts = counts_of(drafted, accepted, committed)  # [M, 6]
        np.add.at(of_request, request, counts)
        np.add.at(of_depth, np.searchsorted(DEPTH_EDGES, depths, side="right") - 1, counts)
        has_chain = owners >= 0
        np.add.at(of_drafter, label_of[owners[has_chain]], counts[has_chain])
    statistics.per_request = [*starmap(DraftCounts, of_request.tolist())]
    statistics.total = DraftCounts(*of_request.sum(0).tolist())
    for edge, counts_at in zip(DEPTH_EDGES, of_depth.tolist(), strict=True):
        if any(counts_at):
            statistics.per_depth[edge] = DraftCounts(*counts_at)
    statistics.per_drafter = dict(zip(labels, starmap(DraftCounts, of_drafter.tolist()), strict=True))
    for kind in kinds - {DraftedChains}:  # those of a paper, with further chains
        kind.count_others(statistics, rounds, label_of)


def counts_of(drafted: NDArray[Any], accepted: NDArray[Any], committed: NDArray[Any]) -> Integers:
    """`[..., 6]`: :class:`DraftCounts` of chains, by their tokens and the row's `committed` ones."""
    blocks = np.broadcast_to(committed > 0, drafted.shape)  # a row in step that had ended takes no token
    first, tokens = (drafted.clip(max=1), accepted.clip(max=1)), np.minimum(accepted + 1, committed)
    return np.stack([drafted, accepted, blocks, *first, tokens], axis=-1).astype(np.int64)


def thin(changes: list[Any], most: int, when: int) -> None:
    """Merges the two shortest neighbouring spans until `most` of `changes` remain, but never the open span. The field
    `when` of a change is its round; later fields are the changed ones."""
    while len(changes) > most:
        at = min(range(1, len(changes) - 1), key=lambda at: changes[at + 1][when] - changes[at - 1][when])
        one, other, ended = changes[at - 1 : at + 2]
        longer = one if 2 * other[when] >= one[when] + ended[when] else other
        changes[at - 1 : at + 1] = [(*one[: when + 1], *longer[when + 1 :])]
        for place in (at, at - 1):
            if place and changes[place][when + 1 :] == changes[place - 1][when + 1 :]:
                del changes[place]
