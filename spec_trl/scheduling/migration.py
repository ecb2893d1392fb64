"""Which rows a rank gives to one that has none left, and how much of their K/V moves with them (SA §4.3).

The tail of a row's K/V is sent while the other rank computes the head again: both should end at the same time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .affine_seconds import AffineSeconds, fit_affine


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


def step_seconds(rounds: Iterable[tuple[int, int, float]]) -> AffineSeconds:
    """Seconds in which each row of a batch advances by a token.

    Args:
        rounds: (rows, tokens that these committed together, seconds) of measured rounds, at least one.
    """
    return fit_affine([(batch, seconds * batch / tokens, tokens / batch) for batch, tokens, seconds in rounds])


def rows_to_give(lengths: Sequence[int], steps: float, step: AffineSeconds, costs: MoveCosts) -> int:
    """How many rows to give away, the shortest ones; 0: none.

    Both ranks should end as early as possible: this one after the rows that stay, the other one after the move and
    the rows that came. Beside its K/V a move costs each of them about a round: this one copies the rows, the other one
    takes them up in a forward of its own.

    Args:
        lengths: tokens of each row, prompts included, ascending.
        steps: tokens that each row is expected to generate yet.
        step: of :func:`step_seconds`, on either rank.
        costs: of a move.
    """
    batch, moved = len(lengths), 0
    best, best_seconds = 0, steps * step(batch)
    for count in range(1, batch):
        moved += lengths[count - 1]
        seconds = max((steps + 1) * step(batch - count), costs.seconds(moved) + (steps + 1) * step(count))
        if seconds < best_seconds:
            best, best_seconds = count, seconds
    return best
