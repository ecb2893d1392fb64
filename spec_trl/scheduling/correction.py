"""Measured round times correct the profile while decoding (the online half of ER App. E.3)."""

from collections import deque
from statistics import median


MEMORY = 16  # rounds of one size that count


class OverheadCorrection:
    """How many seconds longer than predicted rounds of one kind take.

    Batches within a factor of 2 share one, since a profile errs differently for few rows and for many; for a size that
    was never measured the nearest one counts. It is the median of the newest rounds: one slow round changes nothing.
    """

    def __init__(self) -> None:
        self._residuals: dict[int, deque[float]] = {}  # by the batch's bit length
        self._overheads: dict[int, float] = {}  # medians, as they are asked for

    def record(self, batch: int, predicted: float, seconds: float) -> None:
        """Takes one round of `batch` rows that took `seconds` instead of `predicted`."""
        size = batch.bit_length()
        self._residuals.setdefault(size, deque(maxlen=MEMORY)).append(seconds - predicted)
        self._overheads.pop(size, None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._residuals

    def knows(self, batch: int, rounds: int, reach: int = 0) -> bool:
        """Whether at least `rounds` rounds were measured of the size of `batch`, or up to `reach` sizes away."""
        size = batch.bit_length()
        return any(abs(other - size) <= reach and len(found) >= rounds for other, found in self._residuals.items())

    def batches(self, rounds: int) -> list[int]:
        """The smallest batch of each size of which at least `rounds` rounds were measured."""
        return [1 << size - 1 for size, found in sorted(self._residuals.items()) if len(found) >= rounds]

    def apply(self, batch: int, predicted: float) -> float:
        """Corrected seconds; at least a tenth of the prediction, since a residual of another size may be too large."""
        if self.is_empty:
            return predicted
        size = batch.bit_length()
        nearest = min(self._residuals, key=lambda measured: (abs(measured - size), measured))
        if nearest not in self._overheads:
            self._overheads[nearest] = median(self._residuals[nearest])
        return max(predicted + self._overheads[nearest], 0.1 * predicted)
