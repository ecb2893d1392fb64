"""Reconstructs the rounds that decoding without drafts would have run, to estimate the speedup."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from .admission import AdmissionDelay


class PlainRounds(NamedTuple):
    """`rounds` autoregressive rounds of `batch` rows of mean length `length`."""

    rounds: int
    batch: int
    length: float


def plain_rounds(
    prompts: Sequence[tuple[int, str]], tokens: Sequence[int], capacity: int, done: int = 0
) -> list[PlainRounds]:
    """Rounds of plain decoding, between changes of the batch.

    Args:
        prompts: tokens of each request when its first round begins, and its prompt's key.
        tokens: of each request that come from rounds; with 0 it gives its row to the next one at once.
        capacity: rows; further requests wait, and follow in order.
        done: rounds to leave out at the beginning.
    """
    rounds: list[PlainRounds] = []
    # A heap of (round in which it ends, length that it would have had in round 0, key).
    rows: list[tuple[int, int, str]] = []
    delay, now, admitted, lengths = AdmissionDelay(capacity), 0, 0, 0
    while rows or admitted < len(prompts):
        free, wait = capacity - len(rows), 0
        if free and admitted < len(prompts):
            wait = delay.rounds(free, {key for *_, key in rows}, prompts[admitted][1])
        while not wait and admitted < len(prompts) and len(rows) < capacity:
            start = prompts[admitted][0] - now
            heapq.heappush(rows, (now + tokens[admitted], start, prompts[admitted][1]))
            lengths += start
            admitted += 1
        end, first = min(rows[0][0], now + (wait or rows[0][0])), max(now, done)
        delay.wait(free if wait else 0, end - now)
        if end > first:
            rounds.append(PlainRounds(end - first, len(rows), lengths / len(rows) + (first + end - 1) / 2))
        now = end
        while rows and rows[0][0] == now:
            lengths -= heapq.heappop(rows)[1]
    return rounds
