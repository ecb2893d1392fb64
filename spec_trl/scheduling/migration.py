"""Which rows a rank gives to one that has none left, and how much of their K/V moves with them (SA §4.3).

The tail of a row's K/V is sent while the other rank computes the head again: both should end at the same time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MoveCosts:
    """Seconds per token of a row's K/V: to `compute` it again, and to `send` it. None: nothing was sent yet."""

    compute: float
    send: float | None

    @property
    def head_share(self) -> float:
        """Share of the columns that is computed again, so that computing them takes as long as sending the others; a
        half as long as nothing was sent."""
        return 0.5 if self.send is None else self.send / (self.send + self.compute)

    def seconds(self, tokens: int) -> float:
        """What it takes to move `tokens` tokens' K/V."""
        return tokens * self.compute * self.head_share


def measured_send_seconds(tokens: int, computing: float, waiting: float) -> float | None:
    """Seconds per token of K/V that was sent.

    Args:
        tokens: that were sent.
        computing: seconds in which the head was computed meanwhile.
        waiting: seconds that the receiver then waited. Where that is next to nothing, sending took less than
            computing; it is taken to have taken half, so that the next move sends more.
    """
    if not tokens:
        return None
    return (computing / 2 if waiting < computing / 100 else computing + waiting) / tokens


class StepSeconds:
    """Seconds in which each of `batch` rows advances by a token: a line over the batch, fitted by least squares.

    Args:
        rounds: (rows, tokens that these committed together, seconds) of measured rounds, at least one.
    """

    def __init__(self, rounds: Iterable[tuple[int, int, float]]) -> None:
        points = [(batch, seconds * batch / tokens, tokens / batch) for batch, tokens, seconds in rounds]
        total = sum(weight for _, _, weight in points)
        batches = sum(weight * batch for batch, _, weight in points) / total
        seconds = sum(weight * step for _, step, weight in points) / total
        spread = sum(weight * (batch - batches) ** 2 for batch, _, weight in points)
        along = sum(weight * (batch - batches) * (step - seconds) for batch, step, weight in points)
        # Steps of a larger batch never take less, and of no batch less than nothing: noise may say so.
        slope = min(max(along / spread, 0.0), seconds / batches) if spread else 0.0
        self._fixed, self._slope = seconds - slope * batches, slope

    def __call__(self, batch: int) -> float:
        return self._fixed + self._slope * batch


def rows_to_give(lengths: Sequence[int], steps: float, step_seconds: StepSeconds, costs: MoveCosts) -> int:
    """How many rows to give away, the shortest ones; 0: none.

    Both ranks should end as early as possible: this one after the rows that stay, the other one after the move and
    the rows that came.

    Args:
        lengths: tokens of each row, prompts included, ascending.
        steps: tokens that each row is expected to generate yet.
        step_seconds: of a batch, on either rank.
        costs: of a move.
    """
    batch, moved = len(lengths), 0
    best, best_seconds = 0, steps * step_seconds(batch)
    for count in range(1, batch):
        moved += lengths[count - 1]
        seconds = max(steps * step_seconds(batch - count), costs.seconds(moved) + steps * step_seconds(count))
        if seconds < best_seconds:
            best, best_seconds = count, seconds
    return best
