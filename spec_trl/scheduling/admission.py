"""When free rows are given to waiting requests, and the rounds that decoding without drafts would have run, which its
admissions decide."""

import heapq
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple


MAX_EMPTY_ROUNDS = 0.25
"""Rounds that empty rows may cost until more are free: each costs a round over the number of all rows. A forward over
several short prompts takes little longer than over one, and a wait that saves nothing has cost no more than this. Of
the values simulated (benchmarks/admission.py) the largest that lengthens no case by more than 0.2 %."""


class AdmissionDelay:
    """Decides when free rows are given to requests: when several can be, whose prompts are then read at once.

    Args:
        capacity: number of all rows.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._empty = 0  # rows times rounds that were empty since the last admission

    def rounds(self, free: int, in_flight: Collection[str], upcoming: str | None) -> int:
        """Rounds to wait before `free` rows are filled. Returns 0, and starts counting anew, when no row decodes, or
        when the key of the next prompt, `upcoming` (None: unknown), is among those `in_flight`: its K/V is there."""
        left = math.ceil((MAX_EMPTY_ROUNDS * self._capacity - self._empty) / free) - 1
        if left > 0 and in_flight and upcoming not in in_flight:
            return left
        self._empty = 0
        return 0

    def waits(self, free: int, in_flight: Collection[str], upcoming: str | None) -> bool:
        """Whether `free` rows stay empty for the next round, which then counts."""
        if not self.rounds(free, in_flight, upcoming):
            return False
        self.wait(free, 1)
        return True

    def wait(self, free: int, rounds: int) -> None:
        """`free` rows were empty for `rounds` rounds."""
        self._empty += free * rounds


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
