"""The rule that the planner must beat: try each drafter at each γ, keep the fastest, and try all again later."""

from collections import defaultdict
from collections.abc import Sequence

from spec_trl.generation.planner.control import Candidate, Chain, Control, Tally


TRIAL = 1  # rounds of a trial; best of 1, 2, 4 in the worlds of `control_regret`
EVERY = 1000  # rounds of a batch size after which all are tried again; best of 200, 500, 1,000 there
FADE = 0.95  # decay of a choice's tokens and seconds per round of the choice, as in the planner


class FastestControl(Control):
    """Measures tokens per second of no draft, and of each candidate at each γ, per bit length of the number of rows.

    Args:
        candidates: drafters.
        draft_lengths: γ to choose from.
        trial, every: rounds of a trial, and rounds from trial to trial.
    """

    def __init__(
        self, candidates: Sequence[Candidate], draft_lengths: Sequence[int], trial: int = TRIAL, every: int = EVERY
    ) -> None:
        self.candidates, self.tallies = candidates, [Tally() for _ in candidates]
        self._plans: list[tuple[Chain, ...]] = [()]
        self._plans += [(Chain(place, length),) for length in draft_lengths for place in range(len(candidates))]
        self._trials = [plan for plan in self._plans for _ in range(trial)]
        self._totals: dict[tuple[int, tuple[Chain, ...]], tuple[float, float]] = defaultdict(lambda: (1e-9, 1e-9))
        self._rounds: dict[int, int] = defaultdict(int)  # of each size since its last trials began
        self._every, self._now = every + len(self._trials), (0, self._plans[0])

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        size = len(requests).bit_length()
        at, self._rounds[size] = self._rounds[size] % self._every, self._rounds[size] + 1
        best = max(self._plans, key=lambda plan: self._totals[size, plan][0] / self._totals[size, plan][1])
        self._now = size, self._trials[at] if at < len(self._trials) else best
        if any(len(requests) > self.candidates[chain.drafter].max_rows for chain in self._now[1]):
            self._now = size, ()
        return self._now[1]

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if draft_length == sum(chain.draft_length for chain in self._now[1]):  # less: a rollout's last rounds
            tokens_before, seconds_before = self._totals[self._now]
            self._totals[self._now] = FADE * tokens_before + tokens, FADE * seconds_before + seconds

    def drop(self, index: int) -> None:
        self.candidates[index].max_rows = 0
