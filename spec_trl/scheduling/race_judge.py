"""Whether racing pays, by what rounds really take and commit: a prediction of free tokens may be wrong."""

from collections import deque
from enum import IntEnum
from statistics import mean, median
from typing import NamedTuple

from .toggle import HOPELESS, PROBE_ROUNDS, WINDOW


NEAR = 4 / 3
"""Rounds of batches up to so much larger or smaller are compared: what their costs are taken in proportion to is only
predicted."""


class Field(IntEnum):
    """Who may race."""

    NOBODY = 0
    LOOKUPS = 1
    """Drafters that cost no forward."""
    EVERYBODY = 2


class _Raced(NamedTuple):
    cost: float
    tokens: int
    alone: float
    networks: bool
    gain: float
    plain_cost: float


class RaceJudge:
    """Compares raced rounds with the unraced ones around them, over windows of 16.

    What a raced round would have brought without the race is known from the round itself: its primary's own chains.
    Only the time is not, and that is taken from unraced rounds at about this batch; where there are too few, from some
    in between. A race pays where the tokens gained outweigh the time lost, time in medians, as the toggle judges. One
    that does not pay goes on among lookups alone if networks drafted in it, else it is off; in both cases until the
    batch has halved. It is off, too, where its rounds are slower than autoregressive decoding: then the primary is
    judged by itself.

    Args:
        race: False: rows have one chain each, of methods of their own, and a verdict against them is one against all.

    A round's cost is its seconds over those that an autoregressive round of the same batch is predicted to take.
    """

    def __init__(self, race: bool = True) -> None:
        self._race = race
        self._unraced: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._field = Field.EVERYBODY
        self._judged_at = 0  # batch of the last verdict against the race
        self.forget()

    def forget(self) -> None:
        """Another primary drafts from now on: the rounds so far are no comparison. Verdicts hold."""
        self._unraced.clear()
        self._begin_window()

    def _begin_window(self) -> None:
        self._raced: deque[_Raced] = deque(maxlen=WINDOW)
        self._rounds = 0
        self._probing, self._judgement_due = 0, False

    def field(self, batch: int) -> Field:
        """Who may race in the next round, one of `batch` rows; `NOBODY` in a round that is to be compared with."""
        if self._field is not Field.EVERYBODY and 2 * batch <= self._judged_at:
            self._field = Field.EVERYBODY
            self._begin_window()
        if self._judgement_due and not self._probing:
            self._judge(batch)
        if self._probing:
            self._probing -= 1
            return Field.NOBODY
        return self._field

    @property
    def verdict(self) -> Field:
        """Who may race as far as is known."""
        return self._field

    def record_unraced(self, batch: int, cost: float) -> None:
        """A round of the primary alone."""
        self._unraced.append((batch, cost))

    def record_raced(
        self, cost: float, tokens: int, alone: float, networks: bool, gain: float, plain_cost: float
    ) -> None:
        """A round that committed `tokens`, `alone` of which the primary would have brought by itself; `networks`: some
        further chain was not looked up. `gain` are its tokens per row, `plain_cost` its seconds over those that an
        autoregressive round was measured to take."""
        self._raced.append(_Raced(cost, tokens, alone, networks, gain, plain_cost))
        self._rounds += 1
        self._judgement_due |= self._rounds % WINDOW == 0 or self._rounds in HOPELESS

    def _judge(self, batch: int) -> None:
        around = [cost for other, cost in self._unraced if NEAR * min(other, batch) >= max(other, batch)]
        if len(around) < PROBE_ROUNDS:
            self._probing = PROBE_ROUNDS
            return
        self._judgement_due = False
        gained = sum(each.tokens for each in self._raced) / sum(each.alone for each in self._raced)
        lost = median(each.cost for each in self._raced) / median(around)
        enough = 1.0 if self._rounds >= WINDOW else HOPELESS[max(n for n in HOPELESS if n <= self._rounds)]
        speedup = mean(each.gain for each in self._raced) / median(each.plain_cost for each in self._raced)
        if gained < enough * lost or speedup < enough:
            networks = any(each.networks for each in self._raced)
            narrows = self._race and self._field is Field.EVERYBODY and networks and speedup >= enough
            self._field = Field.LOOKUPS if narrows else Field.NOBODY
            self._judged_at = batch
            self._begin_window()
