"""The control of a rank that races for rows of another one (SA §4.2): the method that it was given drafts for them."""

from collections.abc import Sequence

from ..scheduling.control import Chain, Control, Explanation
from ..scheduling.plain_decoding import PlainRounds


class RaceHelper(Control):
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

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        self._batch = len(requests)
        candidate = self.candidates[self._which]
        return () if self._batch > candidate.max_rows else (Chain(self._which, candidate.draft_length),)

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if draft_length:
            self.tallies[self._which].add_round(self._batch, tokens, seconds)

    def drop(self, index: int) -> None:
        self.own.drop(index)

    def finish(self) -> None:
        self.own.finish()

    def explain(self) -> Explanation:
        return self.own.explain()

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        return self.own.plain_seconds(rounds)
