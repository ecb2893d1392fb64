"""A simulated machine that decodes with a best-of-N control."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_trl.scheduling.acceptance import Acceptance, AcceptanceCounts
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.control import Candidate, Chain
from spec_trl.scheduling.ladder import Ladder, Rung
from spec_trl.scheduling.selection import AcceptanceHistory


NETWORKS = ("self", "model")
GAMMAS = (2, 4, 8)


@dataclass
class Machine:
    """Decodes with a control: drafts are right with a probability by method and request.

    Args:
        drafting: seconds of one draft token of each method.
        acceptance: p of (method, request).
        verifying: seconds of a target forward over so many tokens.
        capturing: further seconds of the first three rounds of a shape, which say that they are not typical.
    """

    drafting: dict[str, float]
    acceptance: Callable[[str, int], float]
    verifying: Callable[[int], float] = lambda tokens: 1.0
    capturing: float = 0.0
    seed: int = 0
    plans: list[tuple[list[int], int, Sequence[Chain]]] = field(default_factory=list)  # requests, waiting, plan
    rounds: int = 0
    seconds: float = 0.0
    asked: Counter[tuple[int, int]] = field(default_factory=Counter)  # by rows and Σγ of the row with most

    def ladder(self, **changes: Callable[[int], float]) -> Ladder:
        """What profiling it would find; `verifying` where the profile is to be wrong."""
        verifying = changes.get("verifying", self.verifying)
        rungs = [
            Rung(name, batch, gamma, p, gamma * draft + verifying(batch * (1 + gamma)), verifying(batch))
            for name, draft in self.drafting.items()
            for batch, gamma, p in itertools.product((1, 4, 16), GAMMAS, (0.3, 0.9))
        ]
        return Ladder(tuple(rungs), "machine")

    def control(self, history: AcceptanceHistory | None = None, **options: Any) -> BestOfN:
        candidates = [Candidate(name, 5, 5.0, 1000, None, name in NETWORKS) for name in self.drafting]
        ladder = options.pop("ladder", None) or self.ladder()
        return BestOfN(candidates, ladder, history or AcceptanceHistory(), **options)

    def run(
        self,
        control: BestOfN,
        tokens: list[int],
        capacity: int | None = None,
        prompts: str = "prompt",
        failing: tuple[int, int] | None = None,
    ) -> "Machine":
        """One rollout of requests of so many tokens; `failing`: a round and the candidate that fails before it."""
        chance = random.Random(self.seed)
        self.plans, self.rounds, self.seconds = [], 0, 0.0
        names = [candidate.name for candidate in control.candidates]
        left, rows = dict(enumerate(tokens)), list[int]()
        waiting = list(left)
        control.begin(capacity or len(tokens), [f"{prompts} {request}" for request in left])
        while left:
            while waiting and len(rows) < (capacity or len(tokens)):
                rows.append(waiting.pop(0))
            if failing and failing[0] == self.rounds:
                control.drop(failing[1])
            plan = control.plan(list(rows), 100.0, len(waiting))
            self.plans.append((list(rows), len(waiting), plan))
            accepted: dict[int, list[int]] = {chain.which: [-1] * len(rows) for chain in plan}
            drafted = {which: list(counts) for which, counts in accepted.items()}
            widths, drafts = [0] * len(rows), 0.0
            for chain in plan:
                drafts += chain.draft_length * self.drafting[names[chain.which]]
                for row in range(len(rows)) if chain.rows is None else chain.rows:
                    p = self.acceptance(names[chain.which], rows[row])
                    right = next((k for k in range(chain.draft_length) if chance.random() >= p), chain.draft_length)
                    accepted[chain.which][row] = min(right, left[rows[row]])
                    drafted[chain.which][row] = min(chain.draft_length, left[rows[row]])
                    widths[row] += chain.draft_length
            kept = [
                min(1 + max((counts[row] for counts in accepted.values()), default=0), left[request])
                for row, request in enumerate(rows)
            ]
            seconds = drafts + self.verifying(len(rows) * (1 + max(widths)))
            if plan:
                control.record_rows(list(rows), accepted, drafted)
            self.asked[len(rows), max(widths)] += 1
            is_typical = not self.capturing or self.asked[len(rows), max(widths)] > 3
            seconds += 0.0 if is_typical else self.capturing
            control.record(max(widths), seconds, sum(kept), is_typical)
            self.rounds += 1
            self.seconds += seconds
            for request, count in zip(rows, kept, strict=True):
                left[request] -= count
            rows = [request for request in rows if left[request]]
            left = {request: count for request, count in left.items() if count}
        control.finish()
        return self

    def widths(self) -> list[tuple[int, int, int]]:
        """By round: rows, Σγ of the row with most, and chains of the row with most."""
        found = []
        for rows, _, plan in self.plans:
            chains: list[list[int]] = [[] for _ in rows]
            for chain in plan:
                for row in range(len(rows)) if chain.rows is None else chain.rows:
                    chains[row].append(chain.draft_length)
            found.append((len(rows), max(map(sum, chains)), max(map(len, chains))))
        return found

    def verified_in_races(self) -> list[int]:
        """Tokens verified in each round in which some row had several chains."""
        return [rows * (1 + width) for rows, width, most in self.widths() if most > 1]

    def drafters(self) -> list[set[int]]:
        """Candidates that draft, by round."""
        return [{chain.which for chain in plan} for _, _, plan in self.plans]

    def drafting_rounds(self) -> int:
        """Rounds in which anybody drafts."""
        return sum(map(bool, self.drafters()))


def at(rate: float, positions: float) -> AcceptanceCounts:
    """So many first positions and as many further ones, all accepted at `rate`."""
    return AcceptanceCounts.expecting(Acceptance.geometric(rate), positions)


def history_of(positions: float = 10**6, /, **rates: float) -> AcceptanceHistory:
    """Each method drafted for prompts of its own at this rate."""
    history = AcceptanceHistory()
    for method, rate in rates.items():
        history.record(method, f"old {method}", at(rate, positions))
    return history


def by_method(**rates: float) -> Callable[[str, int], float]:
    return lambda name, request: rates[name]
