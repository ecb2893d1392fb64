"""How often a drafter learns while it drafts: the update stride S of Test-Time Speculation (TTS App. C.1, C.2)."""

STRIDES = (1, 2, 5, 10, 20, 50)
"""What an adaptive stride may be: the strides of TTS Tab. 7 and 8, more evenly spaced."""
WINDOW = 32
"""Number of rounds whose mean block efficiency is compared with that of the same number before."""
CHANGE = 0.05
"""A smaller relative change of the block efficiency from one window to the next counts as none."""


class UpdateStride:
    """Says after which rounds the drafter learns: every S of them.

    An adaptive S (future work in TTS, App. C.2) compares the block efficiency τ of each window of rounds with that of
    the window before. Where τ fell, S becomes the next smaller one; where τ is level, the next larger one, since
    updates bring nothing now; where τ rose, S stays.

    Args:
        fixed: S; None: adaptive, from the third of `STRIDES` on.
    """

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self.begin()

    def begin(self) -> None:
        """Learning starts anew, with the first round."""
        self._index = 2
        self._waited = self.rounds - 1
        self._previous: float | None = None
        self._sum, self._count = 0.0, 0

    @property
    def rounds(self) -> int:
        """S in force."""
        return self._fixed if self._fixed is not None else STRIDES[self._index]

    def is_due(self) -> bool:
        """Whether the drafter learns from this round; asked once in each round that drafted."""
        self._waited += 1
        if self._waited < self.rounds:
            return False
        self._waited = 0
        return True

    def observe(self, block_efficiency: float) -> None:
        """The last round committed `block_efficiency` tokens per row, the corrected or bonus token included."""
        self._sum += block_efficiency
        self._count += 1
        if self._count < WINDOW:
            return
        mean, previous = self._sum / self._count, self._previous
        self._previous, self._sum, self._count = mean, 0.0, 0
        if previous is None:
            return
        if mean < (1 - CHANGE) * previous:
            self._index = max(self._index - 1, 0)
        elif mean <= (1 + CHANGE) * previous:
            self._index = min(self._index + 1, len(STRIDES) - 1)
