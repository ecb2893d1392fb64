"""How often a drafter learns while it drafts: the update stride S of Test-Time Speculation (TTS App. C.1)."""


class UpdateStride:
    """Says after which rounds the drafter learns: every `rounds` (S) of them."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.begin()

    def begin(self) -> None:
        """Learning starts anew, with the first round."""
        self._waited = self.rounds - 1

    def is_due(self) -> bool:
        """Whether the drafter learns from this round; asked once in each round that drafted."""
        self._waited += 1
        if self._waited < self.rounds:
            return False
        self._waited = 0
        return True
