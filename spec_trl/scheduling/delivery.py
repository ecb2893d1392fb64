"""Whether a rollout reached the speedup that was expected of the method that began to draft for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from .last_row import rollout_seconds


LEAST_TOKENS = 16  # of the longest row after an opening: fewer are over in a few rounds, which tell nothing
OUTLIER = 3.0  # a round's cost counts at most this many times the usual one: in a longer round the machine was busy


class Delivery(NamedTuple):
    """Speedup over plain decoding since `which` began to draft for `requests` of mean length `length`."""

    which: int
    requests: list[int]
    length: float
    speedup: float


class _Opening(NamedTuple):
    which: int
    length: float
    rounds: int  # of the rollout until then
    written: dict[int, int]  # by request


class _Round(NamedTuple):
    cost: float | None  # in autoregressive rounds
    plain_seconds: float  # of one of those
    drafted: bool


class RolloutWatch:
    """Compares the rounds after each opening with autoregressive decoding of the same tokens."""

    def __init__(self) -> None:
        self._written: dict[int, int] = {}  # since the first opening
        self._rounds: list[_Round] = []
        self._openings: list[_Opening] = []

    def open(self, which: int, requests: Sequence[int], length: float) -> None:
        """From now on `which` drafts for `requests`, all of which have a row."""
        written = {request: self._written.get(request, 0) for request in requests}
        self._openings.append(_Opening(which, length, len(self._rounds), written))

    def forget(self) -> None:
        """Drops the openings so far."""
        self._openings.clear()

    def record(
        self,
        requests: Sequence[int],
        accepted: Mapping[int, Sequence[int]],
        seconds: float | None,
        plain_seconds: float,
    ) -> None:
        """Takes a round.

        Args:
            requests: one per row.
            accepted: by candidate, accepted draft tokens per row; -1: it had no chain there.
            seconds: of the round; None: not typical, so the usual time of rounds with drafts, or without, counts.
            plain_seconds: predicted, of an autoregressive round.
        """
        if not self._openings:
            return
        cost = None if seconds is None else seconds / plain_seconds
        self._rounds.append(_Round(cost, plain_seconds, bool(accepted)))
        written, chains = self._written, list(accepted.values()) or [[0] * len(requests)]
        for request, count in zip(requests, chains[0] if len(chains) == 1 else map(max, *chains), strict=True):
            written[request] = written.get(request, 0) + (1 + count if count > 0 else 1)

    def deliveries(self, plain_seconds: Callable[..., float]) -> Iterator[Delivery]:
        """Compares each opening; `plain_seconds` gives an autoregressive round's time by rows and mean `length`."""
        costs = [(cost, drafted) for cost, _, drafted in self._rounds if cost is not None]
        if not costs:
            return
        usual = median(cost for cost, _ in costs)
        of_kind = {kind: median([c for c, drafted in costs if drafted == kind] or [usual]) for kind in (False, True)}
        took = [
            (of_kind[drafted] if cost is None else min(cost, OUTLIER * usual)) * plain
            for cost, plain, drafted in self._rounds
        ]
        for opening in self._openings:
            ahead = [self._written.get(request, done) - done for request, done in opening.written.items()]
            seconds, length = sum(took[opening.rounds :]), opening.length + sum(ahead) / len(ahead) / 2
            if max(ahead) >= LEAST_TOKENS and seconds > 0:
                plain = rollout_seconds(ahead, partial(plain_seconds, length=length))
                yield Delivery(opening.which, list(opening.written), opening.length, plain / seconds)
