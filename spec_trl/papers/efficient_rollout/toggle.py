"""Decides by the roofline whether a round drafts: EfficientRollout's π_SD (ER §3.2, Eq. 3)."""

from collections.abc import Sequence

from ...generation.planner.clock import RoundSeconds
from ...generation.planner.control import (
    FAILED,
    Candidate,
    Chain,
    Control,
    Explanation,
    PlainRounds,
    Tally,
    decision,
    promise,
)


class RooflineToggle(Control):
    """Drafts in rounds with a predicted speedup of 1 + ε or more. Measured times are ignored.

    Once on, it stays on while the batch only shrinks (ER App. E.4). If the batch can grow (refill), every round is
    decided again, and waiting requests count as rows.

    Args:
        candidate: the drafter, with γ and τ_prev, set by the caller or by the last rollout (ER Algorithm 1).
        seconds: predicts rounds.
        margin: ε.
    """

    def __init__(self, candidate: Candidate, seconds: RoundSeconds, margin: float = 0.05) -> None:
        self.candidates, self._seconds, self._margin = [candidate], seconds, margin
        self.begin(1, [])

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self.tallies = [Tally()]
        self._capacity, self._refills = capacity, len(prompts) > capacity
        self._is_on = self._failed = False
        self._now = 1, 0.0, 1.0  # rows, their mean length, and the speedup predicted for them
        self._best: Explanation | None = None  # of the rounds without drafts

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        (candidate,), batch = self.candidates, len(requests)
        ahead = min(self._capacity, batch + waiting)
        speedup = self._predict(ahead, length)
        self._now = batch, length, speedup
        self._is_on = speedup >= 1 + self._margin or (self._is_on and not self._refills)
        if self._is_on and not self._failed and batch <= candidate.max_rows:
            return (Chain(0, candidate.draft_length),)
        if self._best is None or speedup > (self._best.predicted_speedup or 0.0):
            self._best = self.forecast(ahead, length)
        return ()

    def _predict(self, batch: int, length: float) -> float:
        (candidate,) = self.candidates
        lengths = {candidate.name: candidate.draft_length}
        cycle = self._seconds(lengths, candidate.draft_length, batch, length)  # γ T̂_q + T̂_V
        return candidate.block_efficiency * self._seconds({}, 0, batch, length) / cycle

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        (candidate,), (tally,) = self.candidates, self.tallies
        if draft_length < candidate.draft_length or not is_typical:  # plain, or a rollout's last rounds
            return
        batch, length, speedup = self._now
        tally.add_round(batch, tokens, seconds)
        tally.baseline_seconds += self._seconds({}, 0, batch, length) * tokens / batch
        tally.predicted_sum += speedup
        tally.predicted_rounds += 1

    def finish(self) -> None:
        """Sets τ_prev to τ of this rollout if it drafted."""
        self.candidates[0].block_efficiency = self.tallies[0].block_efficiency or self.candidates[0].block_efficiency

    def drop(self, index: int) -> None:
        self._failed = True

    def explain(self) -> Explanation:
        tally = self.tallies[0]
        if self._failed:
            return Explanation(tally.predicted_speedup, FAILED)
        if tally.predicted_speedup is None:
            return self._best or Explanation(None, "the rollout ended before a round was planned")
        return Explanation(
            tally.predicted_speedup, f"the roofline predicted {tally.predicted_speedup:.2f}× in {tally.rounds} rounds"
        )

    def forecast(self, batch: int, length: float) -> Explanation:
        most = self.candidates[0].max_rows
        if batch > most:
            return Explanation.too_many_rows(batch, most)
        speedup = self._predict(batch, length)
        promised = promise("speculation", speedup, batch, length)
        return Explanation(speedup, f"{promised}: {decision(speedup, self._margin)}")

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        return sum(each.rounds * self._seconds({}, 0, each.batch, each.length) for each in rounds)
