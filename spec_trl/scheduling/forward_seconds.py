"""Seconds of a forward before and after it is measured: straight lines between timed ones, and SA's line over rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ForwardSeconds:
    """Seconds of one network's forward, by its tokens: straight lines between those that were timed, and beyond."""

    tokens: Sequence[int]  # ascending, two or more
    seconds: Sequence[float]

    def __call__(self, tokens: int) -> float:
        """Of a forward over `tokens` tokens, all rows together."""
        if tokens <= self.tokens[-1]:
            return float(np.interp(tokens, self.tokens, self.seconds))
        (before, last), (start, end) = self.tokens[-2:], self.seconds[-2:]
        return end + max(end - start, 0.0) / (last - before) * (tokens - last)

    def plus(self, seconds: float) -> "ForwardSeconds":
        """Of forwards that take `seconds` more."""
        return ForwardSeconds(self.tokens, [own + seconds for own in self.seconds])

    def times(self, share: float) -> "ForwardSeconds":
        """Of a network that takes `share` of this one's time."""
        return ForwardSeconds(self.tokens, [share * seconds for seconds in self.seconds])


@dataclass(frozen=True)
class ProbedRounds:
    """Rounds by forwards over short texts that were timed; what a round does between them is left out."""

    target: ForwardSeconds
    drafters: Mapping[str, ForwardSeconds]  # those of networks, per draft token; lookups take no time

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """As :data:`~.control.RoundSeconds`."""
        drafts = sum(count * self.drafters[name](batch) for name, count in lengths.items() if name in self.drafters)
        return self.target(batch * (1 + width)) + drafts


@dataclass(frozen=True)
class AffineSeconds:
    """Seconds of a forward as SA §4.1 models them: b · `per_request` + `fixed`.

    Raises:
        ValueError: a number is negative, or both are 0.
    """

    per_request: float  # D' or V', seconds per request of the batch
    fixed: float  # α or β, seconds

    def __post_init__(self) -> None:
        for name in ("per_request", "fixed"):
            if not vars(self)[name] >= 0:
                raise ValueError(f"{name}={vars(self)[name]} is out of range; it must be at least 0.")
        if not self.per_request + self.fixed > 0:
            raise ValueError("per_request=0 and fixed=0 would take no time at all; one of them must be positive.")

    def __call__(self, batch: int) -> float:
        """Seconds of a forward over `batch` requests."""
        return batch * self.per_request + self.fixed


def fit_affine(times: Sequence[tuple[int, float, float]]) -> AffineSeconds:
    """The line through `times`, of (batch, seconds, weight), by least squares; its parts are never negative.

    Raises:
        ValueError: there is no time.
    """
    if not times:
        raise ValueError("times is empty; a line needs the seconds of one batch at least.")
    total = sum(weight for _, _, weight in times)
    mean_batch = sum(weight * batch for batch, _, weight in times) / total
    mean = sum(weight * seconds for _, seconds, weight in times) / total
    spread = sum(weight * (batch - mean_batch) ** 2 for batch, _, weight in times)
    joint = sum(weight * (batch - mean_batch) * (seconds - mean) for batch, seconds, weight in times)
    slope = max(joint / spread, 0.0) if spread else 0.0
    if mean < slope * mean_batch:  # it would cross 0: the best line through it
        through_zero = sum(w * batch * seconds for batch, seconds, w in times) / sum(w * b * b for b, _, w in times)
        return AffineSeconds(through_zero, 0.0)
    return AffineSeconds(slope, mean - slope * mean_batch)
