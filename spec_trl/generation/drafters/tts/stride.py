"""How often a drafter learns while it drafts: the update stride S of Test-Time Speculation (TTS App. C.1)."""


class UpdateStride:
    """Says after which rounds the drafter learns: every `rounds` (S) of them."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.begin()

    def begin(self) -> None:
        """Learning starts anew, with the first round."""
        self.waited = self.rounds - 1  # rounds since the last update; a checkpoint keeps it

    def is_due(self) -> bool:
        """Whether the drafter learns from this round; asked once in each round that drafted."""
        self.waited += 1
        if self.waited < self.rounds:
            return False
        self.waited = 0
        return True
