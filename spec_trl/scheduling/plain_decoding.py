"""What plain decoding would have taken.

Its tokens are the same, so its rounds are known; their times come from a corrected profile or from measured rounds.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .admission import Patience
from .correction import OverheadCorrection


LEAST_ROUNDS = 3  # measured rounds of a size that make a baseline by themselves: one alone may have been disturbed


class PlainRounds(NamedTuple):
    """`rounds` autoregressive rounds of `batch` rows of mean length `length`."""

    rounds: int
    batch: int
    length: float


def plain_rounds(
    prompts: Sequence[tuple[int, str]], tokens: Sequence[int], capacity: int, done: int = 0
) -> list[PlainRounds]:
    """The rounds of plain decoding, from one change of the batch to the next.

    Args:
        prompts: prompt tokens of each request, and the prompt's key.
        tokens: what it generates, at least 1.
        capacity: rows; further requests wait, and follow in order.
        done: rounds to leave out at the beginning.
    """
    found: list[PlainRounds] = []
    # A heap of (round in which it ends, length that it would have had in round 0, key).
    rows: list[tuple[int, int, str]] = []
    patience, now, admitted, lengths = Patience(capacity), 0, 0, 0
    while rows or admitted < len(prompts):
        free, wait = capacity - len(rows), 0
        if free and admitted < len(prompts):
            wait = patience.rounds(free, {key for *_, key in rows}, prompts[admitted][1])
        while not wait and admitted < len(prompts) and len(rows) < capacity:
            start = prompts[admitted][0] - now
            heapq.heappush(rows, (now + tokens[admitted], start, prompts[admitted][1]))
            lengths += start
            admitted += 1
        end, first = min(rows[0][0], now + (wait or rows[0][0])), max(now, done)
        patience.wait(free if wait else 0, end - now)
        if end > first:
            found.append(PlainRounds(end - first, len(rows), lengths / len(rows) + (first + end - 1) / 2))
        now = end
        while rows and rows[0][0] == now:
            lengths -= heapq.heappop(rows)[1]
    return found


def seconds_of(
    rounds: Sequence[PlainRounds],
    measured: OverheadCorrection,
    predicted: Callable[[int, float], float] | None = None,
) -> float | None:
    """Seconds that `rounds` of plain decoding take: as `predicted` by batch and mean length and corrected by how far
    `measured` rounds were from that; or, where nothing predicts, as `measured`. None: nothing predicts, and most of
    these rounds have a size that was not measured, nor one next to it."""
    if predicted is None:
        near = sum(each.rounds for each in rounds if measured.knows(each.batch, LEAST_ROUNDS, reach=1))
        if 2 * near < sum(each.rounds for each in rounds):
            return None
    return sum(
        each.rounds * measured.apply(each.batch, predicted(each.batch, each.length) if predicted else 0.0)
        for each in rounds
    )
