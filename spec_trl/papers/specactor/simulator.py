"""Simulates a cluster's rollout in discrete events, planned by Algorithms 1 to 3 (SA §4, §5).

A worker executes its requests in periods, whose seconds are affine in the requests (SA §4.1) and in their cached
tokens. Between two events (a request ends, helpers come or go) requests advance at constant rates.
"""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Literal

from ...generation.planner.clock import AffineSeconds
from .assignment import greedy_assignments
from .cluster import Cluster, DrafterModel
from .decoupled_plan import ExecutionPlan, Mode, best_window, execution_plan, group_batch
from .reconfiguration import RECONFIGURATION_TOKENS, RequestPlan, reconfigured
from .token_speed import DraftSeconds, committed_tokens, coupled_speed, replicated, window_tokens


HORIZON = 250
"""Tokens per request between computations of a worker's period, since caches grow."""
_count = itertools.count()  # breaks ties between requests that end at the same time


@dataclass(frozen=True)
class Method:
    """A method of rolling out on a cluster. Raises ValueError if it drafts without a drafter."""

    name: str
    execution: Literal["plain", "coupled", "disaggregated", "decoupled"] = "plain"
    drafters: tuple[str, ...] = ()  # the fastest drafter at the first batch drafts first, others help
    gpus: int = 1  # times the cluster's
    reconfigure: bool = False  # SA Algorithm 2
    best_of_n: bool = False  # SA Algorithm 3
    shared_pool: bool = False  # a worker without requests takes half of the fullest worker's
    overlap: bool = False  # idle workers prepare ended requests while others decode (RLHFuse)

    def __post_init__(self) -> None:
        if not self.drafters and (self.best_of_n or self.execution != "plain"):
            raise ValueError(
                f"drafters=() of the method {self.name!r} does not go with execution={self.execution!r} and "
                f"best_of_n={self.best_of_n}; name at least one."
            )


@dataclass(frozen=True)
class Outcome:
    """One simulated training step."""

    plan: ExecutionPlan
    drafter: str | None  # the first choice
    rollout_seconds: float
    step_seconds: float
    idle_share: float  # of the workers' time until the last request ends
    ends: list[float]  # seconds, by request
    spans: list[list[tuple[float, float, str]]]  # by worker: (from, to, drafter) where it had requests


@dataclass(slots=True, eq=False)
class _Row:
    index: int
    length: int
    acceptance: dict[str, float]  # p by drafter
    copies: "list[_Copy]" = field(default_factory=list)

    @property
    def done(self) -> float:
        return max(copy.done for copy in self.copies)


@dataclass(slots=True, eq=False)
class _Copy:
    """A request on a worker. It has `start + rate * periods` tokens after `periods` periods of the worker."""

    row: _Row
    worker: "_Worker"
    plan: RequestPlan = field(init=False)
    rate: float = field(init=False)  # tokens per period
    share: float = field(init=False)  # of the periods with its verification
    start: float = field(init=False)

    def follow(self, plan: RequestPlan, done: float) -> None:
        worker, window = self.worker, plan.window
        p = self.row.acceptance[worker.drafter.name] if worker.drafter else 0.0
        if plan.mode == "decoupled":
            self.rate, self.share = window_tokens(p, window), 1 / (2 - p**window)
        else:
            self.share = 0.5 if plan.mode == "coupled" and worker.runs_ahead else 1.0
            self.rate = self.share * committed_tokens(p, window + 1)
        self.plan, self.start = plan, done - self.rate * worker.periods

    @property
    def done(self) -> float:
        return self.start + self.rate * self.worker.periods

    @property
    def end(self) -> float:
        """In periods of the worker."""
        return (self.row.length - self.start) / self.rate


@dataclass(slots=True, eq=False)
class _Worker:
    """GPUs that hold one copy of the target, with sums over their requests, so that a period need not visit each."""

    index: int
    drafter: DrafterModel | None
    runs_ahead: bool  # whether its drafters have GPUs of their own and draft while it verifies
    periods: float = 0.0  # decoded so far
    now: float = 0.0  # time of the last period
    seconds: float = 0.0  # of a period
    version: int = 0  # of its entry among the events
    copies: dict[_Copy, None] = field(default_factory=dict)
    arriving: list[tuple[_Copy, float]] = field(default_factory=list)  # with the seconds until their K/V is there
    ends: list[tuple[float, int, _Copy]] = field(default_factory=list)  # a heap; those that have left stay in it
    start: float = 0.0  # sum over copies
    rate: float = 0.0  # likewise
    read_start: float = 0.0  # likewise, each weighted by its share of periods with verification
    read_rate: float = 0.0
    verified: float = 0.0  # requests of a verification
    positions: float = 0.0  # tokens of a verification
    plans: Counter[RequestPlan] = field(default_factory=Counter)
    busy_since: float = 0.0
    reconfigured_at: float = 0.0  # tokens per request
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        return self.start + self.rate * self.periods

    def add(self, copy: _Copy) -> None:
        self.copies[copy] = None
        heapq.heappush(self.ends, (copy.end, next(_count), copy))
        self._count(copy, 1)

    def remove(self, copy: _Copy) -> None:
        del self.copies[copy]
        self._count(copy, -1)

    def _count(self, copy: _Copy, sign: int) -> None:
        mode, window = copy.plan
        self.start += sign * copy.start
        self.rate += sign * copy.rate
        self.read_start += sign * copy.share * copy.start
        self.read_rate += sign * copy.share * copy.rate
        self.verified += sign * copy.share
        self.positions += sign * copy.share * (window if mode == "decoupled" else window + 1)
        self.plans[copy.plan] += sign
        if not self.plans[copy.plan]:
            del self.plans[copy.plan]

    def advance(self, now: float) -> None:
        if self.copies:
            self.periods += (now - self.now) / self.seconds
        self.now = now

    def next_end(self) -> float:
        """Time of the next end in periods; infinity if no request is left."""
        while self.ends and (self.ends[0][2] not in self.copies or self.ends[0][0] != self.ends[0][2].end):
            heapq.heappop(self.ends)  # the request has left, or has another rate now
        return self.ends[0][0] if self.ends else math.inf


class _Simulation:
    def __init__(self, cluster: Cluster, method: Method, seed: int) -> None:
        self.cluster, self.method = cluster, method
        chance = random.Random(seed)
        self.rows = [
            _Row(index, cluster.lengths.draw(chance), {d.name: d.draw(chance) for d in cluster.drafters})
            for index in range(cluster.requests)
        ]
        # Cached tokens of a request at half of its response, for the plans.
        self.mean_length = fmean(row.length for row in self.rows) / 2 + cluster.prompt_tokens
        gpus = cluster.gpus * method.gpus
        self.drafters = {d.name: d for d in cluster.drafters if d.name in method.drafters}
        if len(self.drafters) < len(method.drafters):
            raise ValueError(
                f"drafters={method.drafters} of the method {method.name!r} must be different drafters of the cluster, "
                f"which has {[drafter.name for drafter in cluster.drafters]}."
            )
        self.ladder_order = sorted(self.drafters, key=self._coupled_speed, reverse=True)
        self.first = self.drafters[self.ladder_order[0]] if self.drafters else None
        self.plan = self._plan(gpus)
        group = self.plan.draft_gpus + self.plan.verify_gpus
        ahead = method.execution == "decoupled"
        self.workers = [_Worker(index, self.first, ahead) for index in range(gpus // group)]
        self.active: set[_Row] = set()
        self.freed: list[_Worker] = []
        self.ends: list[float] = []
        self.events: list[tuple[float, int, int]] = []

    # ---- plans -----------------------------------------------------------------------------------------------------

    def _verify(self, gpus: int, positions: int) -> AffineSeconds:
        return self.cluster.target.seconds(positions, self.mean_length)

    def _draft(self, drafter: DrafterModel, length: float | None = None) -> DraftSeconds:
        seconds = drafter.seconds(self.mean_length if length is None else length)
        if self.method.execution != "decoupled":
            seconds = AffineSeconds(seconds.per_request, seconds.fixed + drafter.uncaptured_seconds)
        return replicated(seconds)

    def _coupled_speed(self, name: str) -> float:
        """At the first workers' batch and the mean acceptance: SA's initial selection, without a profiled ladder."""
        batch = group_batch(self.cluster.requests, self.cluster.gpus, self.cluster.worker_gpus)
        return self._coupled_window(self.drafters[name], self.drafters[name].acceptance, batch)[1]

    def _coupled_window(self, drafter: DrafterModel, acceptance: float, batch: int) -> tuple[int, float]:
        return best_window(
            acceptance, batch, self._draft(drafter)(1), partial(self._verify, 1), coupled_speed, bonus=1
        )

    def _plan(self, gpus: int) -> ExecutionPlan:
        execution = self.method.execution
        mode: Mode = "decoupled" if execution == "disaggregated" else execution
        drafter = self.first or self.cluster.drafters[0]
        plan = execution_plan(
            self.cluster.requests, gpus, [self.cluster.worker_gpus], drafter.acceptance, self._draft(drafter),
            self._verify, modes=[mode],
        )  # fmt: skip
        if mode != "decoupled" or self.method.reconfigure:
            return plan
        # SA's ablation counts the plan's window as part of reconfiguration: without, it is that of coupled execution.
        return replace(plan, window=self._coupled_window(drafter, drafter.acceptance, plan.batch)[0])

    def _begin(self, row: _Row, worker: _Worker, plan: RequestPlan, done: float, delay: float = 0.0) -> None:
        """Assigns a request with `done` tokens to `worker`; it waits `delay` seconds for its K/V."""
        copy = _Copy(row, worker)
        copy.follow(plan, done)
        row.copies.append(copy)
        worker.add(copy)
        if delay:
            worker.arriving.append((copy, delay))

    def _period_seconds(self, worker: _Worker) -> float:
        """Seconds of drafting, and of a verification of the requests of `worker` with ready drafts."""
        target, prompt = self.cluster.target, self.cluster.prompt_tokens
        read = max(worker.read_start + worker.read_rate * worker.periods, 0.0) + worker.verified * prompt
        verifying = target.fixed_seconds + worker.positions * target.token_seconds + read * target.cached_token_seconds
        if worker.drafter is None:
            return verifying
        draft = self._draft(worker.drafter, max(worker.tokens, 0.0) / len(worker.copies) + prompt)(
            self.plan.draft_gpus or 1
        )
        drafting = {"coupled": 0.0, "decoupled": 0.0}
        for mode in drafting:
            windows = {plan.window: count for plan, count in worker.plans.items() if plan.mode == mode}
            drafting[mode] = max(windows, default=0) * draft(sum(windows.values()))
        if worker.runs_ahead:
            return max(*drafting.values(), verifying)
        seconds = drafting["coupled"] + verifying
        return seconds + (2 * self.cluster.exchange_seconds if self.method.execution == "disaggregated" else 0.0)

    # ---- events ----------------------------------------------------------------------------------------------------

    def _schedule(self, worker: _Worker) -> None:
        worker.version += 1
        if worker.copies:
            worker.seconds = self._period_seconds(worker)
            for copy, delay in worker.arriving:  # each lags behind by the tokens of the time that it waits
                if copy in worker.copies:
                    worker.remove(copy)
                    copy.start -= copy.rate * delay / worker.seconds
                    worker.add(copy)
            worker.arriving.clear()
            ahead = min(worker.next_end() - worker.periods, HORIZON * len(worker.copies) / worker.rate)
            heapq.heappush(self.events, (worker.now + max(ahead, 0.0) * worker.seconds, worker.index, worker.version))

    def _end(self, row: _Row, now: float) -> Iterable[_Worker]:
        """Ends all copies of a request when the first copy ends. Returns the workers whose requests have changed."""
        self.active.discard(row)
        self.ends.append(now)
        for copy in row.copies:
            worker = copy.worker
            worker.advance(now)
            worker.remove(copy)
            if not worker.copies:
                worker.spans.append((worker.busy_since, now, worker.drafter.name if worker.drafter else "none"))
                self.freed.append(worker)
            yield worker

    def run(self) -> Outcome:
        mode = "coupled" if self.method.execution == "disaggregated" else self.plan.mode
        plan = RequestPlan(mode, self.plan.window)
        for row in self.rows:
            self._begin(row, self.workers[row.index * len(self.workers) // len(self.rows)], plan, 0.0)
            self.active.add(row)
        for worker in self.workers:
            self._schedule(worker)
        while self.active:
            now, index, version = heapq.heappop(self.events)
            worker = self.workers[index]
            if worker.version != version:
                continue
            worker.advance(now)
            changed = {worker: None}
            while worker.next_end() <= worker.periods + 1e-9:
                changed |= dict.fromkeys(self._end(worker.ends[0][2].row, now))
            if self.freed and self.active:
                changed |= dict.fromkeys(self._help(now))
            for each in changed:
                if self.method.reconfigure:
                    self._reconfigure(each)
                self._schedule(each)
        return self._outcome()

    def _reconfigure(self, worker: _Worker) -> None:
        """Runs SA Algorithm 2 after every 1000 tokens, on average, of the worker's requests."""
        if not worker.copies or not worker.runs_ahead or worker.drafter is None:
            return  # a helper chose the request's window when it took the request
        mean = worker.tokens / len(worker.copies)
        if mean < worker.reconfigured_at + RECONFIGURATION_TOKENS:
            return
        worker.reconfigured_at = mean
        # Over 1000 tokens a rate is known to about 0.01.
        acceptance = {copy: round(copy.row.acceptance[worker.drafter.name], 2) for copy in worker.copies}
        plans = reconfigured(acceptance, self.plan, self._draft(worker.drafter), self._verify, len(worker.copies))
        for copy, plan in plans.items():
            if plan != copy.plan:
                worker.remove(copy)
                copy.follow(plan, copy.done)
                worker.add(copy)

    def _help(self, now: float) -> Iterable[_Worker]:
        """Moves requests of other workers to freed workers. Returns the workers whose requests have changed."""
        if self.method.shared_pool:
            enough = self.cluster.max_helped if self.method.best_of_n else 1  # so few gain more by further drafters
            while self.freed:
                fullest = max(self.workers, key=lambda worker: len(worker.copies))
                if len(fullest.copies) <= enough:
                    break
                worker = self.freed.pop()
                fullest.advance(now)
                self._occupy(worker, now, fullest.drafter, fullest.runs_ahead)
                worker.reconfigured_at = fullest.reconfigured_at
                for copy in list(fullest.copies)[::2]:
                    fullest.remove(copy)
                    copy.row.copies.remove(copy)
                    self._begin(copy.row, worker, copy.plan, copy.done, self.cluster.transfer_seconds)
                yield from (worker, fullest)
        if self.method.best_of_n and self.freed:
            yield from self._race(now)

    def _occupy(self, worker: _Worker, now: float, drafter: DrafterModel | None, runs_ahead: bool) -> None:
        worker.now = worker.busy_since = now
        worker.drafter, worker.runs_ahead, worker.seconds, worker.reconfigured_at = drafter, runs_ahead, 0.0, 0.0

    def _race(self, now: float) -> Iterable[_Worker]:
        """Runs SA Algorithm 3: freed workers take slow requests with another drafter."""
        busy = [worker for worker in self.workers if worker.copies]
        for worker in busy:
            worker.advance(now)
        drafter_of = {worker: worker.drafter.name for worker in busy if worker.drafter}
        rows = sorted(self.active, key=lambda row: row.index)
        added = greedy_assignments(
            {row: row.acceptance[drafter_of[row.copies[0].worker]] for row in rows},
            list(self.drafters), self.freed,
            {name: [worker for worker in busy if drafter_of[worker] == name] for name in self.drafters},
            {worker: len(worker.copies) for worker in busy}, self.cluster.max_helped, self.ladder_order,
            {(copy.row, drafter_of[worker]): worker for worker in busy for copy in worker.copies},
        )  # fmt: skip
        for (row, name), worker in added.items():
            if not worker.copies:
                self._occupy(worker, now, self.drafters[name], False)
                self.freed.remove(worker)
            window, _ = self._coupled_window(self.drafters[name], row.acceptance[name], 1)
            self._begin(row, worker, RequestPlan("coupled", window), row.done, self.cluster.transfer_seconds)
            yield worker
        yield from busy  # advanced above, so their next events are computed again

    def _outcome(self) -> Outcome:
        cluster, seconds = self.cluster, max(self.ends)
        busy = sum(end - start for worker in self.workers for start, end, _ in worker.spans)
        idle = max(1 - busy / (seconds * len(self.workers)), 0.0)
        prepare = cluster.prepare_seconds / self.method.gpus
        if self.method.overlap:
            prepare = max(prepare - idle * seconds, prepare / cluster.requests)
        step = seconds + prepare + cluster.learn_seconds / self.method.gpus
        first = self.first.name if self.first else None
        return Outcome(self.plan, first, seconds, step, idle, sorted(self.ends), [w.spans for w in self.workers])


def simulate(cluster: Cluster, method: Method, seed: int = 0) -> Outcome:
    """One training step of `cluster` by `method`. Raises ValueError if the cluster lacks one of its drafters."""
    return _Simulation(cluster, method, seed).run()
