"""Delays free rows until several requests can enter, and counts the rounds of plain decoding."""

import heapq
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple


MAX_EMPTY_ROUNDS = 0.25
"""Most rounds that waiting with empty rows may cost: an empty row costs a round divided by the number of rows. A
forward over several short prompts takes little longer than over one, so admitting several rows at once saves time. The
largest simulated value (benchmarks/admission.py) that lengthens no case by more than 0.2 %."""


class AdmissionDelay:
    """Delays free rows, of `capacity`, until several requests can enter: their prompts are then read together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._empty = 0  # sum over rounds of empty rows, since the last admission

    def rounds(self, free: int, in_flight: Collection[str], upcoming: str | None) -> int:
        """Rounds to wait before `free` rows are filled. Returns 0, and resets the count, if no row decodes, or if the
        next prompt's key, `upcoming` (None: unknown), is among those `in_flight`: K/V of that prompt exists."""
        left = math.ceil((MAX_EMPTY_ROUNDS * self._capacity - self._empty) / free) - 1
        if left > 0 and in_flight and upcoming not in in_flight:
            return left
        self._empty = 0
        return 0

    def waits(self, free: int, in_flight: Collection[str], upcoming: str | None) -> bool:
        """Counts one round with `free` empty rows if they should stay empty, and returns whether they should."""
        if not self.rounds(free, in_flight, upcoming):
            return False
        self.wait(free, 1)
        return True

    def wait(self, free: int, rounds: int) -> None:
        self._empty += free * rounds


class PlainRounds(NamedTuple):
    """`rounds` autoregressive rounds of `batch` rows of mean length `length`."""

    rounds: float
    batch: int
    length: float


def plain_rounds(
    prompts: Sequence[tuple[int, str]], tokens: Sequence[int], capacity: int, done: int = 0
) -> list[PlainRounds]:
    """Rounds of plain decoding, between changes of the batch.

    Args:
        prompts: by request: its tokens at its first round, and key of the prompt.
        tokens: by request, tokens from rounds; 0: the row is free again at once.
        capacity: rows; further requests wait in order.
        done: rounds to leave out at the beginning.
    """
    rounds: list[PlainRounds] = []
    # A heap of (last round, length extrapolated to round 0, key).
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
