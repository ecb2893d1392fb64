"""Further drafters for slow requests (SA §4.2 "Greedy Best-of-N assignments"): `greedy_assignments` is
Algorithm 3, `Racing` the same within one process, where a row's methods are several chains in one target forward."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from .acceptance import Acceptance, AcceptanceCounts
from .ladder import Ladder
from .selection import PROMPT_PRIOR


Request = TypeVar("Request", bound=Hashable)
Worker = TypeVar("Worker", bound=Hashable)

PATIENCE = 16  # rounds in a row that a further chain may lose before it is dropped
PROMOTION = 8  # a further chain becomes the primary when it has won this many more rounds, counted from the last tie
RECENT = 0.95  # weight of a round's counts one round later: acceptance is that of about the last 20 rounds
FALL = 0.15
"""Dropped chains have another chance when the accepted share of the row's drafts has fallen by this much: about twice
the spread of a rate over 40 positions by chance alone."""
YARDSTICK = 5  # γ at which accepted shares are compared, since shares at different γ cannot be
GROWTH = 2.0  # dropped chains have another chance when the row's room has grown by this factor


def greedy_assignments(
    requests: Mapping[Request, float],
    methods: Sequence[str],
    freed: Sequence[Worker],
    workers_of: Mapping[str, Sequence[Worker]],
    load: Mapping[Worker, int],
    max_batch: int,
    ladder_order: Sequence[str],
    assigned: Mapping[tuple[Request, str], Worker],
) -> dict[tuple[Request, str], Worker]:
    """SA Algorithm 3: gives freed workers to methods, then the slowest requests to workers.

    Each freed worker leaves its old method and requests for the method with the fewest workers, among equals the
    better one on the ladder. Each method then takes requests in ascending acceptance (depth first).

    Args:
        requests: the active ones (R) with their acceptance; of equals the first comes first.
        methods: candidates (D).
        freed: workers without requests (W).
        workers_of: W_d before this call.
        load: requests of each worker of `workers_of`.
        max_batch: b_max, requests that one worker verifies at a time.
        ladder_order: all of `methods`, best first.
        assigned: the worker of each present (request, method), initial methods included; none is assigned again.

    Returns:
        M, the worker of each added (request, method).

    Raises:
        ValueError: `methods` is empty, `ladder_order` lacks one of them, or `max_batch` is less than 1.
    """
    if not methods:
        raise ValueError("methods is empty; name at least one that free workers can take.")
    if missing := [method for method in methods if method not in ladder_order]:
        raise ValueError(f"ladder_order={list(ladder_order)} lacks {missing}; rank all of methods.")
    if max_batch < 1:
        raise ValueError(f"max_batch={max_batch} is out of range; it must be at least 1.")
    free = set(freed)
    workers = {method: [worker for worker in workers_of.get(method, ()) if worker not in free] for method in methods}
    loads = Counter({worker: count for worker, count in load.items() if worker not in free})
    taken = {pair for pair, worker in assigned.items() if worker not in free}
    for worker in freed:  # lines 1-3
        fewest = min(methods, key=lambda method: (len(workers[method]), ladder_order.index(method)))
        workers[fewest].append(worker)
    slowest_first = sorted(requests, key=requests.__getitem__)
    added = {}
    for method in methods:  # lines 4-10
        candidates = iter([request for request in slowest_first if (request, method) not in taken])
        for worker in workers[method]:
            while loads[worker] < max_batch and (request := next(candidates, None)) is not None:
                added[request, method] = worker
                loads[worker] += 1
    return added


def further_method(
    requests: Mapping[Request, float], methods: Sequence[str], own: str, helpers: Mapping[tuple[Request, str], int]
) -> tuple[str, list[Request]] | None:
    """What Algorithm 3 gives to one freed worker, seen by the worker that has the requests.

    Args:
        requests: with their acceptance.
        methods: candidates, the best one on the ladder first.
        own: the method that drafts for them here.
        helpers: the worker of each (request, method) that has been given away before.

    Returns:
        The method, and the requests it takes, the slowest first; None: nobody needs it.
    """
    here, freed = -1, -2
    workers = {name: sorted({worker for (_, other), worker in helpers.items() if other == name}) for name in methods}
    if own in workers:
        workers[own].append(here)
    load = Counter(helpers.values()) + Counter({here: len(requests)})
    assigned = {**helpers, **{(request, own): here for request in requests}}
    added = greedy_assignments(requests, methods, [freed], workers, load, len(requests), methods, assigned)
    mine = [pair for pair, worker in added.items() if worker == freed]
    return (mine[0][1], [request for request, _ in mine]) if mine else None


@dataclass(frozen=True)
class RowView:
    """A row as the race sees it."""

    request: int  # whose row it is
    method: str  # the primary that the control gives it; "none" where it has none
    draft_length: int  # the primary's γ, 0 without one
    acceptance: Acceptance  # the primary's, as expected before the row's own rounds


@dataclass(frozen=True)
class MethodView:
    """A method that may draft further chains."""

    name: str  # its strategy, one of the ladder's methods
    draft_length: int  # γ, at least 1
    acceptance: Acceptance  # expected on rows where it has not drafted
    max_rows: int  # most rows that it drafts for at a time, b_max of Algorithm 3


class _Drop(NamedTuple):
    """What was true when a chain was dropped."""

    accepted_share: float  # of the row's drafts
    room: int  # the row's


@dataclass
class _Standing:
    """One method on one row."""

    expected: Acceptance  # before the row's own rounds
    counts: AcceptanceCounts  # of draft positions; they begin as `expected` says and fade
    lost: int = 0  # raced rounds since it last won
    lead: int = 0  # wins over the primary's
    dropped: _Drop | None = None  # None: it may race

    @property
    def acceptance(self) -> Acceptance:
        """Over recent rounds."""
        return self.counts.rates(self.expected, 1.0)

    def reinstate(self) -> None:
        """Gives a dropped method another chance."""
        self.dropped, self.lost, self.lead = None, 0, 0


@dataclass
class _Row:
    primary: str  # as laid out
    promoted: str | None = None
    chains: list[tuple[str, int]] = field(default_factory=list)
    standings: dict[str, _Standing] = field(default_factory=dict)

    def lead_with(self, method: str, draft_length: int, acceptance: Acceptance) -> None:
        """Makes `method` the primary and its chain the only one; γ = 0: no chain."""
        self.primary = method
        self.chains = [(method, draft_length)] if draft_length else []
        self.enter(method, acceptance)
        self.standings[method].reinstate()

    @property
    def accepted_share(self) -> float:
        """Accepted share of the primary's drafts."""
        return _share(self.standings[self.primary].acceptance)

    def enter(self, method: str, acceptance: Acceptance) -> None:
        """Gives `method` a standing, unless it has one, that begins at the expected `acceptance`."""
        if method not in self.standings:
            self.standings[method] = _Standing(acceptance, AcceptanceCounts.expecting(acceptance, PROMPT_PRIOR))


class Racing:
    """Chooses, over one rollout, which further chains each row has verified next to its primary's.

    A row commits the longest accepted one of its chains. All rows of a forward are as wide as the widest, so that
    B · (1 + max_r Σγ) tokens are verified: room is a width, the same for every row. Room and the places at a method
    (`max_rows`) go to the row of lowest acceptance first, all methods to one row before the next (SA: depth first).

    A chain that keeps losing is dropped for its row until the row's acceptance falls or its room grows; one that keeps
    winning becomes the row's primary. `ladder` ranks the methods, at the row's own acceptance where they have drafted.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._rows: dict[int, _Row] = {}
        self._failed: set[str] = set()
        self._room = 0
        # Whether `assign` would decide differently. It does not notice new rows or another primary of the control.
        self.changed = True

    def assign(
        self, rows: Sequence[RowView], methods: Sequence[MethodView], budget: int
    ) -> dict[int, list[tuple[str, int]]]:
        """Lays out the chains of all rows: each row's primary, then further methods, best on the ladder first. The
        last chain that has room is cut, but not below half of its γ. Primaries may exceed the budget.

        Args:
            rows: those in flight; of equal acceptance the first comes first.
            methods: those that may draft further chains, in the ladder (else ValueError); also the control's primary,
                for rows that have another one.
            budget: most tokens of a verification, all rows together.

        Returns:
            (method, γ) of each chain, in their order, by request; an empty list where a row decodes autoregressively.
        """
        self.changed = False
        if not rows:
            return {}
        self._room = budget // len(rows) - 1
        views = {view.name: view for view in methods if view.name not in self._failed}
        slowest_first = sorted(rows, key=self._accepted_share)
        load = self._place_primaries(slowest_first, views)
        speedups: dict[tuple[str, Acceptance], float] = {}
        for row in slowest_first:
            state = self._rows[row.request]
            for standing in state.standings.values():
                if standing.dropped and self._room >= GROWTH * standing.dropped.room:
                    standing.reinstate()
            room = self._room - sum(length for _, length in state.chains)
            for view in self._ranked(state, views.values(), len(rows), speedups):
                if load[view.name] >= view.max_rows:
                    continue
                if not (length := _cut(view.draft_length, room)):
                    break  # going on to a shorter one would let a larger budget take that one away again
                state.enter(view.name, view.acceptance)
                state.chains.append((view.name, length))
                load[view.name] += 1
                room -= length
        return {row.request: list(self._rows[row.request].chains) for row in rows}

    def _accepted_share(self, row: RowView) -> float:
        """Accepted share of the row's primary: GetAcceptRate of Algorithm 3."""
        state = self._rows.get(row.request)
        standing = state.standings.get(state.promoted or row.method) if state else None
        return _share(standing.acceptance if standing else row.acceptance)

    def _place_primaries(self, rows: Sequence[RowView], views: Mapping[str, MethodView]) -> "Counter[str]":
        """Lays out each row's primary; returns how many rows each method drafts for."""
        load = Counter(row.method for row in rows)
        for row in rows:
            state = self._rows.setdefault(row.request, _Row(row.method))
            if state.promoted == row.method:
                state.promoted = None
            view = views.get(state.promoted) if state.promoted else None
            # Room may have shrunk since. A promoted method may take all of it, or what the control's primary would.
            length = _cut(view.draft_length, max(self._room, row.draft_length)) if view else 0
            if view and length and load[view.name] < view.max_rows:
                load[row.method] -= 1
                load[view.name] += 1
                state.lead_with(view.name, length, view.acceptance)
            else:
                state.lead_with(row.method, row.draft_length, row.acceptance)
        return load

    def _ranked(
        self, state: _Row, views: Iterable[MethodView], batch: int, speedups: dict[tuple[str, Acceptance], float]
    ) -> list[MethodView]:
        """The methods that may race the row's primary, best first; `speedups` caches the ladder's."""
        keyed = []
        for view in views:
            standing = state.standings.get(view.name)
            if view.name == state.primary or (standing and standing.dropped):
                continue
            key = view.name, standing.acceptance if standing else view.acceptance
            if key not in speedups:
                speedups[key] = self._ladder.best_draft_length(key[0], key[1].block_efficiency, batch)[1]
            keyed.append((speedups[key], view))
        return [view for _, view in sorted(keyed, key=lambda pair: -pair[0])]

    def record(
        self, request: int, accepted_by_method: Mapping[str, int], draft_lengths: Mapping[str, int] | None = None
    ) -> None:
        """Takes a row's round. The chain with most accepted tokens has won, of equals the earliest.

        Args:
            request: whose row it is.
            accepted_by_method: draft tokens accepted of each chain; methods without a laid-out chain are ignored.
            draft_lengths: γ of chains that were drafted otherwise than laid out, as in a round without a race.
        """
        row = self._rows[request]
        laid_out = dict(row.chains)
        raced = [method for method in laid_out if method in accepted_by_method]
        winner, drafted = row.primary, laid_out | dict(draft_lengths or {})
        for method in raced:
            accepted = accepted_by_method[method]
            counts = AcceptanceCounts.of_round(accepted, min(accepted + 1, drafted[method]))
            row.standings[method].counts.add(counts, RECENT)
            if accepted > accepted_by_method.get(winner, 0):
                winner = method
        led = row.primary in accepted_by_method or row.primary not in laid_out
        if led and any(method != row.primary for method in raced):  # else the control's primary drafted alone
            self._count(row, raced, winner)
        for standing in row.standings.values():
            if standing.dropped and row.accepted_share < standing.dropped.accepted_share - FALL:
                standing.reinstate()
                self.changed = True

    def _count(self, row: _Row, raced: Sequence[str], winner: str) -> None:
        """Counts one round's wins and losses; drops a chain, or promotes it."""
        for method in raced:
            standing = row.standings[method]
            standing.lost = 0 if method == winner else standing.lost + 1
            if method == row.primary:
                continue
            if method == winner:
                standing.lead += 1
            elif winner == row.primary:
                standing.lead = max(standing.lead - 1, 0)
            if standing.lost >= PATIENCE and standing.dropped is None:
                standing.dropped = _Drop(row.accepted_share, self._room)
                self.changed = True
        if winner != row.primary and row.standings[winner].lead == PROMOTION:
            row.promoted = winner
            row.standings[row.primary].reinstate()  # from now on a further chain like others
            for standing in row.standings.values():
                standing.lead = 0
            self.changed = True

    def remove(self, request: int) -> None:
        """Frees the row of a request that has finished."""
        self.changed = True
        del self._rows[request]

    def drop(self, method: str) -> None:
        """The drafter failed: it gets no chain from now on. The control must give another primary to its rows."""
        self._failed.add(method)
        self.changed = True
        for row in self._rows.values():
            row.chains = [chain for chain in row.chains if chain[0] != method]
            if row.promoted == method:
                row.promoted = None


def _share(acceptance: Acceptance) -> float:
    """Accepted over drafted tokens, at γ = `YARDSTICK`."""
    return (acceptance.block_efficiency(YARDSTICK) - 1) / YARDSTICK


def _cut(draft_length: int, room: int) -> int:
    """γ within `room`; 0 where less than half of it would be left."""
    length = min(draft_length, room)
    return length if 2 * length >= draft_length else 0
