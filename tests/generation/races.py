"""Controls and drafters that follow a plan of the test's, so that it knows what should happen in each round."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.planner.acceptance import Drafts
from spec_trl.generation.planner.clock import Clock
from spec_trl.generation.planner.control import Candidate, Chain, Control, Tally
from spec_trl.generation.planner.planner import Planner
from tests.generation.calls import pad_left, random_rows


ROWS = random_rows([5, 9, 1, 12, 7, 3])
PROMPTS = pad_left([*ROWS, ROWS[3]])
EOS = dict(eos_token_id=[7, 11])


class Plans(Control):
    """Plans the same rounds over and over, and writes down what became of them. Failed drafters plan nothing.

    Args:
        count: number of drafters.
        rounds: chains of each round.
    """

    several_chains = True

    def __init__(self, count: int, rounds: Iterable[Sequence[Chain]]) -> None:
        self.planned = [tuple(plan) for plan in rounds]
        most_drafted = max(sum(chain.draft_length for chain in plan) for plan in self.planned)
        self.candidates = [Candidate(f"c{i}", most_drafted, 1.0, 1 << 30) for i in range(count)]
        self.tallies = [Tally() for _ in self.candidates]

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self.begun = capacity, list(prompts)
        self.alive = set(range(len(self.candidates)))
        self.rounds: list[dict[str, Any]] = []
        self.heard: list[tuple[int, int]] = []  # lookup, and tokens of its draft that were right
        self._next = itertools.cycle(self.planned)

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        in_flight = range(len(requests))
        plan = [
            replace(chain, rows=chain.rows and tuple(row for row in chain.rows if row in in_flight))
            for chain in next(self._next)
            if chain.drafter in self.alive
        ]
        self.rounds.append(
            dict(requests=list(requests), length=length, waiting=waiting, plan=plan, accepted={}, drafted={})
        )
        return plan

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        assert list(requests) == self.rounds[-1]["requests"]
        self.rounds[-1] |= {"accepted": dict(accepted), "drafted": dict(drafted)}

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        self.rounds[-1] |= {"width": draft_length, "seconds": seconds, "tokens": tokens, "is_typical": is_typical}

    def record_unverified(
        self, drafter: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        for right, tried in zip(accepted, attempted, strict=True):
            assert 0 <= right <= tried <= self.compared_length and tried >= 1
            self.heard.append((drafter, right))

    def drop(self, index: int) -> None:
        self.alive.discard(index)


class Planned(Plans):
    """Has a planner choose, which is told other seconds than rounds took: it goes from arm to arm."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(len(drafters), [[Chain(0, 10)]])
        self._chance = random.Random(1)
        names = [candidate.name for candidate in self.candidates]
        for candidate, drafter in zip(self.candidates, drafters, strict=True):
            candidate.is_network = drafter.has_probabilities
        drafts = Drafts(names, [not candidate.is_network for candidate in self.candidates])
        self.planner = Planner(self.candidates, (2, 5), Clock(self._predict, 0.5), drafts, now=lambda: 0.0)

    def _predict(self, lengths: Mapping[str, int], *_: float) -> float:
        return self._chance.uniform(0.5, 2.0) / max(len(lengths), 1)  # rounds of two drafters are not rare

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        super().begin(capacity, prompts)
        self.planner.in_step = self.in_step
        self.planner.begin(capacity, prompts)

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        self.planner.budget = 8.0  # trials cost nothing here
        self._next = iter([self.planner.plan(requests, length, waiting)])
        return super().plan(requests, length, waiting)

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        super().record_rows(requests, accepted, drafted)
        self.planner.record_rows(requests, accepted, drafted)

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        super().record(draft_length, seconds, tokens, is_typical)
        self.planner.record(draft_length, self._chance.uniform(0.5, 2.0), tokens)

    def record_unverified(
        self, drafter: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        super().record_unverified(drafter, requests, accepted, attempted)
        self.planner.record_unverified(drafter, requests, accepted, attempted)

    def drop(self, index: int) -> None:
        super().drop(index)
        self.planner.drop(index)

    def finish(self) -> None:
        self.planner.finish()


def random_plans(count: int, seed: int = 0) -> Plans:
    """Rounds of up to four chains of `count` drafters, with γ up to 4 and rows at random; now and then none."""
    draw = random.Random(seed)

    def chain(which: int) -> Chain:
        some = tuple(draw.sample(range(7), draw.randint(1, 7)))
        return Chain(which, draw.randint(1, 4), draw.choice([None, some]))

    members = [draw.sample(range(count), draw.randint(0, min(4, count))) for _ in range(60)]
    return Plans(count, [[chain(which) for which in each] for each in members])


class Knowing(Drafter):
    """Knows what will be sampled, and says it right for a random number of tokens, or for all.

    Args:
        answers: of each request.
        seed: of these numbers; None: all tokens are right.
        name: in the statistics.
    """

    has_probabilities = False

    def __init__(self, answers: list[list[int]], seed: int | None, name: str = "custom") -> None:
        self.answers, self.strategy = answers, name
        self.random = None if seed is None else random.Random(seed)
        self.right: list[dict[int, int]] = []  # by round and request

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        self.right.append({})
        drafts = []
        for request, done in zip(rows.indices, rows.generated.tolist(), strict=True):
            answer = (self.answers[request][done : done + draft_length] + [0] * draft_length)[:draft_length]
            right = self.random.randint(0, draft_length) if self.random else draft_length
            drafts.append(answer[:right] + [(token + 1) % 64 for token in answer[right:]])
            self.right[-1][request] = right
        return Proposal(torch.tensor(drafts), torch.full_like(rows.lengths, draft_length))


def raced(control: Plans) -> int:
    """Number of rounds in which some row had several chains."""
    return sum(
        any(sum(own[row] >= 0 for own in each["accepted"].values()) > 1 for row in range(len(each["requests"])))
        for each in control.rounds
    )
