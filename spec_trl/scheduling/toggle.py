"""When to speculate, and with what: π_SD (ER §3.2, Eq. 3), corrected by what rounds really take."""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from .account import FAILED, Account, decision, promise, too_many_rows
from .control import Candidate, OneDrafter, Tally
from .correction import OverheadCorrection
from .plain_decoding import PlainRounds, seconds_of


PROBE_ROUNDS = 3  # autoregressive rounds that measure the baseline before speculation is judged by it
CONFIDENT = 1.25  # least predicted speedup at which a toggle speculates before it has measured any baseline
WINDOW = 16  # speculative rounds over which a speedup is measured
HOPELESS = {4: 0.6, 8: 0.8}
"""After this number of rounds of the first window a measured speedup below this is enough to give up."""
FEWEST = min(HOPELESS)  # rounds that later rollouts can go by
DOUBT = 1.1  # below this measured speedup the baseline is measured again at about this batch before it decides
SURE = 1.5  # the same in a rollout without any autoregressive round: the machine may have been busy in an earlier one
EVEN = 0.9  # least evenness of a drafter that serves all rows alike
DWELL = 8  # with refill: rounds between two changes, so that throughput does not fall off at the threshold
RETRY_AFTER = 20
"""After this number of rollouts without drafting, old measurements of a drafter are ignored once: it may have improved
with training (ER App. D)."""


class Gain(NamedTuple):
    """τ of a candidate on the rows in flight."""

    of_a_round: float  # the mean
    until_last_row: float  # see `last_row.py`


@dataclass
class _State:
    """What the toggle knows of one candidate; all but `corrections` and `idle` is of one rollout."""

    # By γ, since long drafts may differ from the profile where short ones do not.
    corrections: dict[int, OverheadCorrection] = field(default_factory=lambda: defaultdict(OverheadCorrection))
    window: deque["_Round"] = field(default_factory=lambda: deque(maxlen=WINDOW))
    failed_at: int | None = None  # batch at which it measured slower than autoregressive decoding
    dropped: bool = False
    drafted: bool = False
    idle: int = 0  # rollouts since it drafted
    forgiven: bool = False  # old measurements do not count in this rollout


class _Round(NamedTuple):
    batch: int
    length: float
    seconds: float
    tokens: int


class _Refusal(NamedTuple):
    """A predicted speedup below 1 + ε."""

    which: int
    speedup: float
    batch: int
    length: float


@dataclass(eq=False, repr=False)
class SpeculationToggle(OneDrafter):
    """π_SD over one or several candidates: speculates with the largest predicted speedup if that reaches 1 + ε.

    * Without refill the batch only shrinks, so speculation stays on once it is on (ER App. E.4). With refill it goes
      off again below a predicted speedup of 1 (hysteresis).
    * Measured rounds correct the profile's overhead terms, and a candidate that measures slower than autoregressive
      decoding is off for the rest of the rollout. In doubt autoregressive rounds measure the baseline anew.
    * A candidate without a profile is tried, and tried again once the batch has halved; later rollouts go by the times
      that were measured at such a batch.
    * Requests that wait for a row count as part of the batch: a small batch is a tail only when nobody waits.
    """

    candidates: Sequence[Candidate]  # the drafters to choose among, at least one
    margin: float = 0.05  # ε ≥ 0

    def __post_init__(self) -> None:
        self._states = [_State() for _ in self.candidates]
        self._baseline = OverheadCorrection()  # of autoregressive rounds; without a profile, their times themselves
        self.tallies = [Tally() for _ in self.candidates]
        self.weigh()
        self.judgement_due = False  # whether the next `decide` judges the measured rounds

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        for state in self._states:
            state.idle, state.drafted = (0 if state.drafted else state.idle + 1), False
            state.forgiven = state.idle > RETRY_AFTER
            if state.forgiven:
                state.idle = 0
                state.corrections.clear()
            state.window.clear()
            state.failed_at, state.dropped = None, False
        self.tallies = [Tally() for _ in self.candidates]
        self._capacity = capacity
        self._refills = len(prompts) > capacity
        self._active: int | None = None
        self._since_change = DWELL
        self._probing, self._is_probe = (PROBE_ROUNDS if self._baseline.is_empty else 0), False
        self._anchor: int | None = None  # batch of the newest autoregressive round
        self.judgement_due = False
        self.weigh()
        self._looked_at: int | None = None  # batch at which speculation was last found not to pay
        self._refused: _Refusal | None = None  # the best of this rollout
        self._turned_off: str | None = None  # why, the last time

    def finish(self) -> None:
        """Moves each τ_prev towards this rollout's τ, in proportion to the rounds up to a whole window."""
        for candidate, tally in zip(self.candidates, self.tallies, strict=True):
            if tally.block_efficiency is not None:
                share = min(tally.rounds / WINDOW, 1.0)
                candidate.block_efficiency += share * (tally.block_efficiency - candidate.block_efficiency)

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        self._batch, self._length = batch, length
        self._chosen: int | None = None
        self._since_change += 1
        batch_ahead = min(self._capacity, batch + waiting)
        if self._probing and self._baseline.is_empty and CONFIDENT <= self._best(batch_ahead, length)[1] < math.inf:
            self._probing = 0
        if not self._probing:
            self._update(batch_ahead, batch, length)
        self._is_probe = self._probing > 0
        if self._is_probe:
            self._probing -= 1
        elif self._active is not None and batch <= self.candidates[self._active].max_rows:
            self._chosen = self._active
            self._states[self._active].drafted = True
            return self._active, self.candidates[self._active].draft_length
        return 0, 0

    def _update(self, batch_ahead: int, batch: int, length: float) -> None:
        """Turns speculation on or off; `batch_ahead` includes the rows that waiting requests are about to fill."""
        if self.judgement_due:
            self._judge()
        if self._active is None:
            # Lengths grow by a token per round: what did not pay at this batch a few rounds ago still does not.
            looked_at, self._looked_at = self._looked_at, batch_ahead
            due = batch_ahead != looked_at or self._since_change % DWELL == 0
            if due and (not self._refills or self._since_change >= DWELL):
                best, speedup = self._best(batch_ahead, length)
                if speedup >= 1 + self.margin:
                    self._turn(best)
                elif best is not None and (self._refused is None or speedup > self._refused.speedup):
                    self._refused = _Refusal(best, speedup, batch_ahead, length)
        elif self._refills and self._since_change >= DWELL:
            if (speedup := self.predicted_speedup(self._active, batch, length)) < 1:
                self._turn(None, f"{self._promise(self._active, speedup, batch, length)}: switched off")

    def weigh(
        self,
        gains: Sequence[Gain | None] | None = None,
        others_can_help: bool = False,
        delivered: Sequence[float] | None = None,
    ) -> None:
        """Sets what the candidates do for the rows in flight; without arguments, that nothing is known of it.

        Args:
            gains: of each candidate; None: these rows are taken to be alike.
            others_can_help: other drafters may draft for rows that one leaves behind. Then unevenness is a reason to
                prefer another drafter, but not to stop.
            delivered: share of each candidate's predicted speedup that earlier rollouts delivered at this batch.
        """
        self._gains = gains or [None for _ in self.candidates]
        self._others_can_help = others_can_help
        self._delivered = delivered or [1.0 for _ in self.candidates]

    def _evenness(self, index: int) -> float:
        gain = self._gains[index]
        return gain.until_last_row / gain.of_a_round if gain else 1.0

    def _best(self, batch: int, length: float) -> tuple[int | None, float]:
        """The candidate of largest predicted speedup, with that: of a round where others can help, else until the last
        row ends."""
        best: tuple[int | None, float] = (None, 0.0)
        for index in self._eligible(batch):
            speedup = self._promised_speedup(index, batch, length)
            speedup *= 1.0 if self._others_can_help else self._evenness(index)
            if best[0] is None or speedup > best[1]:
                best = index, speedup
        return best

    def _turn(self, active: int | None, why: str | None = None) -> None:
        """Makes `active` draft from now on; None: nothing, for the reason `why`."""
        self._active, self._since_change = active, 0
        self._turned_off = why or self._turned_off

    def _eligible(self, batch: int) -> Iterator[int]:
        """Candidates that may draft for `batch` rows."""
        for index, (candidate, state) in enumerate(zip(self.candidates, self._states, strict=True)):
            if not state.dropped and batch <= candidate.max_rows:
                if state.failed_at is None or (candidate.roofline is None and 2 * batch <= state.failed_at):
                    yield index

    def _promised_speedup(self, index: int, batch: int, length: float) -> float:
        """The predicted speedup; until this rollout has measured its rows, the share that earlier ones delivered."""
        share = self._delivered[index] if self._gains[index] is None else 1.0
        return self.predicted_speedup(index, batch, length) * share

    def predicted_speedup(self, index: int, batch: int, length: float) -> float:
        """Eq. 3's left side for a candidate, with corrected times; infinite where only trying can tell."""
        candidate, state = self.candidates[index], self._states[index]
        if candidate.roofline is not None:
            return self.speedup_at(self._block_efficiency(index), index, batch, length)
        if len(state.window) == WINDOW:
            return self._measured_speedup(index)
        times = state.corrections[candidate.draft_length]
        if not times.knows(batch, FEWEST):
            return math.inf
        return self._block_efficiency(index) * self.autoregressive_seconds(batch, length) / times.apply(batch, 0)

    def speedup_at(self, block_efficiency: float, index: int, batch: int, length: float) -> float:
        """The same of a candidate that has a roofline, at a given τ."""
        candidate = self.candidates[index]
        correction = self._states[index].corrections[candidate.draft_length]
        plain, cycle = (
            self.autoregressive_seconds(batch, length),
            candidate.cycle_seconds(candidate.roofline, batch, length),
        )
        if not correction.is_empty:
            cycle = correction.apply(batch, cycle)
        else:  # until it is measured: off by the same factor as autoregressive rounds
            cycle *= plain / self._predicted_plain(batch, length)
        return block_efficiency * plain / cycle

    def _block_efficiency(self, index: int) -> float:
        """τ of the rows in flight, else of this rollout, else τ_prev."""
        if (gain := self._gains[index]) is not None:
            return gain.of_a_round
        if self.tallies[index].rounds >= WINDOW:
            return self.tallies[index].block_efficiency or 1.0
        candidate = self.candidates[index]
        return candidate.draft_length + 1.0 if self._states[index].forgiven else candidate.block_efficiency

    def autoregressive_seconds(self, batch: int, length: float) -> float:
        """T_p: by the corrected profile, or else as last measured at about this batch."""
        return self._baseline.apply(batch, self._predicted_plain(batch, length))

    def _predicted_plain(self, batch: int, length: float) -> float:
        """T̂_p, which is the same for all candidates; 0 without a profile, whose corrections are whole times."""
        roofline = self.candidates[0].roofline
        return 0.0 if roofline is None else roofline.target_seconds(batch, length)

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if not is_typical:
            self._probing += self._is_probe  # this probe is repeated
            return
        batch, length = self._batch, self._length
        if draft_length == 0:
            self._anchor = batch
            self._baseline.record(batch, self._predicted_plain(batch, length), seconds)
            return
        if self._chosen is None or draft_length < self.candidates[self._chosen].draft_length:
            return  # a rollout's last rounds, too short to judge by
        index = self._chosen
        candidate, state, tally = self.candidates[index], self._states[index], self.tallies[index]
        baseline = self.autoregressive_seconds(batch, length)
        if candidate.roofline is not None:
            tally.predicted_sum += self.predicted_speedup(index, batch, length)
            tally.predicted_rounds += 1
        cycle = candidate.cycle_seconds(candidate.roofline, batch, length)  # 0 without a profile
        state.corrections[candidate.draft_length].record(batch, cycle, seconds)
        tally.add_round(batch, tokens, seconds)
        tally.baseline_seconds += baseline * tokens / batch
        state.window.append(_Round(batch, length, seconds, tokens))
        self.judgement_due |= tally.rounds % WINDOW == 0 or tally.rounds in HOPELESS

    def _measured_speedup(self, index: int) -> float:
        """τ T_p / T_cycle over the candidate's newest rounds, in medians of the times."""
        window = self._states[index].window
        costs = [r.seconds / self.autoregressive_seconds(r.batch, r.length) for r in window]
        return sum(r.tokens / r.batch for r in window) / len(window) / median(costs)

    def _judge(self) -> None:
        """Turns the active candidate off where it measures slower than autoregressive decoding, and to another one
        that promises more."""
        self.judgement_due = False
        index = self._active
        if index is None or not self._states[index].window:
            return
        measured, rounds = self._measured_speedup(index), self.tallies[index].rounds
        enough = 1.0 if rounds >= WINDOW else HOPELESS[max(n for n in HOPELESS if n <= rounds)]
        until_last_row = measured * self._evenness(index)
        worth = measured if self._others_can_help else until_last_row
        # Without a profile nothing is known of this batch until it is measured.
        unknown = self.candidates[index].roofline is None
        doubtful = (SURE if self._anchor is None else DOUBT) if rounds >= WINDOW else enough
        # Whether the newest autoregressive round of this rollout had half to twice the present rows.
        near = self._anchor is not None and 2 * min(self._anchor, self._batch) >= max(self._anchor, self._batch)
        if (unknown or worth < doubtful) and not near:
            self._probing, self.judgement_due = PROBE_ROUNDS, True  # measure the baseline here, then decide
            return
        better = self._better(index, worth, until_last_row) if rounds >= WINDOW else None
        found = f"{self._who(index)} measured {measured:.2f}× of plain decoding after {rounds} rounds"
        if measured < enough:
            self._states[index].failed_at = self._batch
            self._states[index].window.clear()
            self._turn(None, f"{found}: switched off")
        elif worth < enough:  # of these rows; other rows may do better
            self._turn(None, f"{found}, {worth:.2f}× until the last row ends: switched off")
        if better is not None:
            self._turn(better)

    def _better(self, active: int, worth: float, until_last_row: float) -> int | None:
        """The most promising of the candidates that beat the active one by the margin: in their rounds, if the last
        row ends no later; or, if they serve all rows alike, until the last row ends."""
        more = 1 + self.margin
        promises: dict[int, float] = {}
        for index in self._eligible(self._batch):
            if index == active:
                continue
            of_a_round = self._promised_speedup(index, self._batch, self._length)
            of_last_row = of_a_round * self._evenness(index)
            promised = of_a_round if self._others_can_help else of_last_row
            is_even = self._evenness(index) >= EVEN and of_last_row >= max(until_last_row, 1.0) * more
            if is_even or (promised >= max(worth, 1.0) * more and of_last_row >= until_last_row):
                promises[index] = promised
        return max(promises, key=promises.__getitem__, default=None)

    def drop(self, index: int) -> None:
        self._states[index].dropped = True
        if self._active == index:
            self._turn(None, FAILED)

    # ---- in words ---------------------------------------------------------------------------------------------------

    def account(self) -> Account:
        tally, refused = sum(self.tallies, Tally()), self._refused
        predicted = tally.predicted_speedup
        if predicted is None and refused is not None:
            predicted = None if self.candidates[refused.which].roofline is None else refused.speedup
        return Account(predicted, self._reason(tally))

    def _reason(self, tally: Tally) -> str:
        if self._active is None and self._turned_off is not None:
            return self._turned_off
        if tally.rounds:
            measured, predicted = tally.measured_speedup, tally.predicted_speedup
            found = "no plain round to compare with" if measured is None else f"measured {measured:.2f}×"
            if predicted is None:
                return f"no profile: {tally.rounds} rounds tried, {found}"
            return f"speculation predicted {predicted:.2f}×, {found} in {tally.rounds} rounds"
        if self._refused is not None:
            return f"{self._promise(*self._refused)}: {decision(self._refused.speedup, self.margin)}"
        if all(state.dropped for state in self._states):
            return FAILED
        if self._batch > self._most_rows:
            return too_many_rows(self._batch, self._most_rows)
        return "the rollout ended before a drafter was measured"

    @property
    def _most_rows(self) -> int:
        return max(candidate.max_rows for candidate in self.candidates)

    def forecast(self, batch: int, length: float) -> Account:
        speedups = {
            index: self.predicted_speedup(index, batch, length)
            for index, candidate in enumerate(self.candidates)
            if batch <= candidate.max_rows
        }
        if not speedups:
            return Account(None, too_many_rows(batch, self._most_rows))
        best, speedup = max(speedups.items(), key=lambda pair: pair[1])
        if speedup == math.inf:
            return Account(None, "no profile: drafters are tried, and their rounds measured")
        reason = f"{self._promise(best, speedup, batch, length)}: {decision(speedup, self.margin)}"
        return Account(None if self.candidates[best].roofline is None else speedup, reason)

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        is_profiled = self.candidates[0].roofline is not None
        return seconds_of(rounds, self._baseline, self._predicted_plain if is_profiled else None)

    def _promise(self, index: int, speedup: float, batch: int, length: float) -> str:
        by = "measured, in earlier rounds," if self.candidates[index].roofline is None else "predicted"
        return promise(self._who(index), speedup, batch, length, by)

    def _who(self, index: int) -> str:
        return "speculation" if len(self.candidates) == 1 else f'speculation with "{self.candidates[index].name}"'
