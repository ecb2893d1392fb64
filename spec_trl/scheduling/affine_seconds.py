"""Seconds of a forward as a line over the rows of the batch (SA §4.1), and its fit to measured times."""

from collections.abc import Sequence
from dataclasses import dataclass


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
