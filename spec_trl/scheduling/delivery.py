"""Whether a rollout became as much faster as was expected of the method that began to draft for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from .last_row import rollout_seconds


LEAST_TOKENS = 16
"""Of the row with most ahead, for a rollout to tell: fewer are over in a few rounds."""
OUTLIER = 3.0
"""A round that took so many times what is usual beside an autoregressive one counts as so much: the machine was
busy."""


class Delivery(NamedTuple):
    """What became of one opening: `which` candidate began to draft for `requests` of mean length `length`, and the end
    of the last of them came `speedup` times as soon as by autoregressive decoding."""

    which: int
    requests: list[int]
    length: float
    speedup: float


@dataclass(frozen=True)
class _Opening:
    which: int
    length: float
    rounds: int  # of the rollout until then
    written: dict[int, int]  # by request


class _Round(NamedTuple):
    cost: float | None  # in autoregressive rounds
    plain_seconds: float  # of one of those
    drafted: bool


class RolloutWatch:
    """Told of every round of a rollout, it compares the rest of it, from each opening on, with the autoregressive
    decoding of as many tokens."""

    def __init__(self) -> None:
        self._written: dict[int, int] = {}  # since the first opening
        self._rounds: list[_Round] = []
        self._openings: list[_Opening] = []

    def open(self, which: int, requests: Sequence[int], length: float) -> None:
        """From now on `which` drafts, for `requests`; none of them waits for a row."""
        written = {request: self._written.get(request, 0) for request in requests}
        self._openings.append(_Opening(which, length, len(self._rounds), written))

    def forget(self) -> None:
        """Openings so far are not compared."""
        self._openings.clear()

    def record(
        self,
        requests: Sequence[int],
        accepted: Mapping[int, Sequence[int]],
        seconds: float | None,
        plain_seconds: float,
    ) -> None:
        """A round: draft tokens accepted of each candidate's chains, per row (-1: it had none), its time (None: no
        typical one, so that what is usual for rounds that drafted, or for the others, counts), and what an
        autoregressive round is predicted to take."""
        if not self._openings:
            return
        cost = None if seconds is None else seconds / plain_seconds
        self._rounds.append(_Round(cost, plain_seconds, bool(accepted)))
        written, chains = self._written, list(accepted.values()) or [[0] * len(requests)]
        for request, count in zip(requests, chains[0] if len(chains) == 1 else map(max, *chains), strict=True):
            written[request] = written.get(request, 0) + (1 + count if count > 0 else 1)

    def deliveries(self, plain_seconds: Callable[[int, float], float]) -> Iterator[Delivery]:
        """What became of the openings. `plain_seconds` says those of an autoregressive round, by rows and length."""
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
            seconds = sum(took[opening.rounds :])
            if max(ahead) >= LEAST_TOKENS and seconds > 0:
                plain = _plainly(ahead, opening.length + sum(ahead) / len(ahead) / 2, plain_seconds)
                yield Delivery(opening.which, list(opening.written), opening.length, plain / seconds)


def _plainly(ahead: Sequence[int], length: float, plain_seconds: Callable[[int, float], float]) -> float:
    return rollout_seconds(ahead, lambda rows: plain_seconds(rows, length))
