"""The control of a rank that races for rows of another one (SA §4.2): the method that it was given drafts for them."""

from collections.abc import Sequence

from ..scheduling.account import Account
from ..scheduling.control import Control, OneDrafter
from ..scheduling.plain_decoding import PlainRounds


class RaceHelper(OneDrafter):
    """Drafts with one candidate in each round.

    Args:
        own: the rank's own control, which goes on when the race is over.
        which: index of the candidate.
    """

    def __init__(self, own: Control, which: int) -> None:
        self.own = own
        self.candidates, self.tallies = own.candidates, own.tallies
        self._which = which
        self._batch = 0

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        self._batch = batch
        candidate = self.candidates[self._which]
        return self._which, 0 if batch > candidate.max_rows else candidate.draft_length

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if draft_length:
            self.tallies[self._which].add_round(self._batch, tokens, seconds)

    def drop(self, index: int) -> None:
        self.own.drop(index)

    def finish(self) -> None:
        self.own.finish()

    def account(self) -> Account:
        return self.own.account()

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        return self.own.plain_seconds(rounds)
