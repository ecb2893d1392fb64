"""Noise of several rounds at once: on a CPU, hashing a small vocabulary's costs its calls more than its numbers."""

from .noise import CPU_CHUNK, RoundNoise
from .rows import Rows


MOST_ROUNDS = 16
"""Rounds whose noise is hashed at once: the calls then cost a sixteenth each, and rows that end waste little."""


class NoiseAhead:
    """Gives each round its noise; for rounds that draw one token per row on a CPU it hashes that of later ones too."""

    def __init__(self, rows: Rows, vocabulary: int) -> None:
        self._rows, self._vocabulary = rows, vocabulary
        self._indices: list[int] = []  # of the rows whose noise is kept
        self._lengths = rows.host_lengths  # of the same, when it was hashed
        self._taken = self._kept = 0  # rounds

    def of_round(self, count: int) -> RoundNoise:
        """The noise at the next `count` positions of the rows in flight."""
        rows = self._rows
        if count > 1 or rows.tokens.device.type != "cpu":
            return RoundNoise(rows.noise_keys(count), self._vocabulary)
        goes_on = rows.indices == self._indices and (rows.host_lengths == self._lengths + self._taken).all()
        if not goes_on or self._taken == self._kept:
            most = min(MOST_ROUNDS, CPU_CHUNK // (rows.active * self._vocabulary), rows.columns - rows.longest)
            self._kept, self._taken = max(most, 1), 0
            self._indices, self._lengths = list(rows.indices), rows.host_lengths.copy()
            self._noise = RoundNoise(rows.noise_keys(self._kept), self._vocabulary)
        self._taken += 1
        return self._noise.part(self._taken - 1)
