"""Chooses the draft length of vLLM's steps by the planner of our own rounds."""

import time
from collections.abc import Callable, Sequence

from ..generation.planner.acceptance import Drafts
from ..generation.planner.clock import PROBE_ERROR, Clock
from ..generation.planner.control import Candidate
from ..generation.planner.planner import Planner


DRAFT_COST = {"self": 0.3, "model": 0.3, "eagle3": 0.1, "mtp": 0.1, "history": 0.01, "ngram": 0.01}
"""First guess of a draft token's seconds, in those of a step without drafts; the clock corrects it by what it sees."""
LOOKED_UP = "history", "ngram"

newest_length: int | None = None
"""γ of the newest step of this process; None: nothing plans here, and drafts have vLLM's fixed length."""


class StepPlanner:
    """Plans steps of a vLLM: the drafts that a step makes are verified in the next one. So a step tells what a draft
    length costs once the step before it had the same length, and each length stays for a step of that kind.

    Args:
        strategy: of the drafter.
        draft_lengths: γ to choose from, beside 0.
        capacity: most rows.
        now: seconds.
    """

    def __init__(
        self,
        strategy: str,
        draft_lengths: Sequence[int],
        capacity: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        cost, self._capacity, self._now = DRAFT_COST[strategy], capacity, now
        longest, is_network = max(draft_lengths), strategy not in LOOKED_UP
        candidate = Candidate(strategy, longest, float(longest), capacity, is_network)
        clock = Clock(lambda lengths, *_: 1 + cost * sum(lengths.values()), PROBE_ERROR)
        drafts = Drafts([strategy], [not is_network])
        self._planner = Planner([candidate], draft_lengths, clock, drafts, race=False, now=now)
        self._length = self._steps = 0  # γ now, and complete steps that had it
        self._started: float | None = None  # of the newest step; None: between rollouts

    def next_length(self, rows: int, length: float, waiting: int) -> int:
        """γ of the next step, of `rows` rows of mean `length` tokens, while `waiting` requests have no row."""
        if self._started is None:
            self._planner.begin(self._capacity, ["rollout"] * self._capacity)
            self._length, self._steps, self._started = 0, 0, self._now()
        if self._steps != 1:  # else the first step with this length has yet to be followed by one that verifies it
            chains = self._planner.plan(range(rows), length, waiting)
            chosen = chains[0].draft_length if chains else 0
            self._steps = self._steps if chosen == self._length else 0
            self._length = chosen
        return self._length

    def observe(self, rows: int, accepted: Sequence[int], drafted: Sequence[int], reads_prompts: bool) -> None:
        """Records the newest step: of its rows, accepted and verified draft tokens of those that had drafts."""
        if self._started is None:  # vLLM takes an empty step after the last row
            return
        now, self._steps = self._now(), self._steps + 1
        seconds, self._started = now - self._started, now
        if self._steps < 2 or (self._length and len(accepted) < rows):
            return  # it verified drafts of another length, or of a few rows
        if self._length:
            self._planner.record_rows(range(rows), {0: accepted}, {0: drafted})
        width = max(drafted, default=0)
        self._planner.record(width, seconds, rows + sum(accepted), not reads_prompts)

    def end(self) -> None:
        """Ends a rollout, after its newest step."""
        if self._started is not None:
            self._planner.finish()
            self._started = None
