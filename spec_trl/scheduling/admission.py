"""When free rows are given to waiting requests."""

import math
from collections.abc import Collection


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
