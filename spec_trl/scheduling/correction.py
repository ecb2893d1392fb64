"""Measured round times correct the profile while decoding (the online half of ER App. E.3)."""

from collections import deque
from statistics import median


MEMORY = 16
"""Rounds of one size that count."""


class OverheadCorrection:
    """How much longer rounds of one kind take than predicted: a correction of the overhead per round, in seconds.

    Kept apart for batches of like size (up to a factor of 2), because a profile errs differently for few rows and for
    many; where a size was never measured, the nearest one speaks for it. Each is the median over the newest rounds:
    one round that the machine spent elsewhere changes nothing.
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

    def knows(self, batch: int, rounds: int) -> bool:
        """Whether so many rounds of about `batch` rows were measured."""
        return len(self._residuals.get(batch.bit_length(), ())) >= rounds

    def batches(self, rounds: int) -> list[int]:
        """The smallest batch of each size of which so many rounds were measured."""
        return [1 << size - 1 for size, found in sorted(self._residuals.items()) if len(found) >= rounds]

    def apply(self, batch: int, predicted: float) -> float:
        """Corrected seconds; never less than a tenth of the prediction, which a residual of other shapes could ask."""
        if self.is_empty:
            return predicted
        size = batch.bit_length()
        nearest = min(self._residuals, key=lambda measured: (abs(measured - size), measured))
        if nearest not in self._overheads:
            self._overheads[nearest] = median(self._residuals[nearest])
        return max(predicted + self._overheads[nearest], 0.1 * predicted)

    def is_near(self, batch: int, rounds: int) -> bool:
        """Whether so many rounds were measured of a size next to that of `batch` or the same."""
        return any(
            abs(size - batch.bit_length()) <= 1 and len(found) >= rounds for size, found in self._residuals.items()
        )
