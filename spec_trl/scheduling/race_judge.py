"""Whether racing pays, by what rounds really take and commit: predicted free tokens may not be free."""

from collections import deque
from enum import IntEnum
from statistics import mean, median
from typing import NamedTuple

from .toggle import HOPELESS, PROBE_ROUNDS, WINDOW


NEAR = 4 / 3  # rounds are compared if their batches differ by at most this factor


class Field(IntEnum):
    """Who may race."""

    NOBODY = 0
    LOOKUPS = 1  # drafters that cost no forward
    EVERYBODY = 2


class RacedRound(NamedTuple):
    """What the judge looks at in a raced round."""

    cost: float  # of the round
    tokens: int  # committed
    alone: float  # tokens that the primary would have committed alone
    networks: bool  # whether a further chain was drafted by a network
    gain: float  # tokens per row
    plain_cost: float  # seconds over the measured seconds of an autoregressive round


class RaceJudge:
    """Compares raced rounds with the unraced ones around them, over windows of 16.

    * A race pays where the share of tokens gained over the primary's own chains is larger than that of time lost over
      unraced rounds at about this batch. If there are too few of those, some are run in between.
    * One that does not pay goes on among lookups alone if networks drafted in it, else it is off, until the batch has
      halved. It is off too where its rounds are slower than autoregressive decoding: the primary is judged alone then.

    A round's cost is its seconds over the predicted seconds of an autoregressive round of the same batch. Without
    `race` rows have one chain each, prompts' own methods among them; a verdict then ends all of those.
    """

    def __init__(self, race: bool = True) -> None:
        self._race = race
        self._unraced: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.verdict = Field.EVERYBODY
        self._judged_at = 0  # batch of the last verdict against the race
        self.forget()

    def forget(self) -> None:
        """Drops the rounds so far, since another primary drafts from now on. Verdicts hold."""
        self._unraced.clear()
        self._begin_window()

    def _begin_window(self) -> None:
        self._raced: deque[RacedRound] = deque(maxlen=WINDOW)
        self._rounds = 0
        self._probing, self._judgement_due = 0, False

    def field(self, batch: int) -> Field:
        """Who may race in the next round, of `batch` rows; `NOBODY` where the round serves as comparison."""
        if self.verdict is not Field.EVERYBODY and 2 * batch <= self._judged_at:
            self.verdict = Field.EVERYBODY
            self._begin_window()
        if self._judgement_due and not self._probing:
            self._judge(batch)
        if self._probing:
            self._probing -= 1
            return Field.NOBODY
        return self.verdict

    def record_unraced(self, batch: int, cost: float) -> None:
        """Takes a round of the primary alone."""
        self._unraced.append((batch, cost))

    def record_raced(self, raced: RacedRound) -> None:
        """Takes a raced round."""
        self._raced.append(raced)
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
            narrows = self._race and self.verdict is Field.EVERYBODY and networks and speedup >= enough
            self.verdict = Field.LOOKUPS if narrows else Field.NOBODY
            self._judged_at = batch
            self._begin_window()
