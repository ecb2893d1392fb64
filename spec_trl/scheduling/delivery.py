"""Whether a rollout became as much faster as was expected of the method that began to draft for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .last_row import rollout_seconds


LEAST_TOKENS = 16
"""Of the row with most ahead, for a rollout to tell: fewer are over in a few rounds."""


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
    seconds: float  # of the rollout until then
    written: dict[int, int]  # by request


class RolloutWatch:
    """Told of every round of a rollout, it compares the rest of it, from each opening on, with the autoregressive
    decoding of as many tokens."""

    def __init__(self) -> None:
        self._written: dict[int, int] = {}
        self._seconds = 0.0
        self._openings: list[_Opening] = []

    def open(self, which: int, requests: Sequence[int], length: float) -> None:
        """From now on `which` drafts, for `requests`; none of them waits for a row."""
        written = {request: self._written.get(request, 0) for request in requests}
        self._openings.append(_Opening(which, length, self._seconds, written))

    def record(self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], seconds: float) -> None:
        """A round: draft tokens accepted of each candidate's chains, per row, and its time."""
        self._seconds += seconds
        for row, request in enumerate(requests):
            longest = max((counts[row] for counts in accepted.values()), default=0)
            self._written[request] = self._written.get(request, 0) + 1 + max(longest, 0)

    def deliveries(self, plain_seconds: Callable[[int, float], float]) -> Iterator[Delivery]:
        """What became of the openings. `plain_seconds` says those of an autoregressive round, by rows and length."""
        for opening in self._openings:
            ahead = [self._written.get(request, done) - done for request, done in opening.written.items()]
            if max(ahead) < LEAST_TOKENS:
                continue
            plain = _plainly(ahead, opening.length + sum(ahead) / len(ahead) / 2, plain_seconds)
            speedup = plain / (self._seconds - opening.seconds)
            yield Delivery(opening.which, list(opening.written), opening.length, speedup)


def _plainly(ahead: Sequence[int], length: float, plain_seconds: Callable[[int, float], float]) -> float:
    return rollout_seconds(ahead, lambda rows: plain_seconds(rows, length))
