"""Controls and drafters with which the tests let chains race."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal
from spec_trl.scheduling.account import Account
from spec_trl.scheduling.control import Candidate, Chain, Tally
from spec_trl.scheduling.plain_decoding import PlainRounds
from tests.generation.calls import pad_left, random_rows


ROWS = random_rows([5, 9, 1, 12, 7, 3])
PROMPTS = pad_left([*ROWS, ROWS[3]])


class RandomPlans:
    """Up to `chains` chains of random drafters, γ and rows in each round; now and then none.

    Args:
        count: of drafters.
        seed: of the plans.
        chains: at most, in one round.
        longest: γ.
    """

    races = True

    def __init__(self, count: int, seed: int = 0, chains: int = 4, longest: int = 4) -> None:
        self.candidates = [Candidate(f"c{i}", longest, 1.0, 1 << 30) for i in range(count)]
        self.tallies = [Tally() for _ in self.candidates]
        self._chains, self._longest, self._seed = chains, longest, seed

    @property
    def most_drafted(self) -> int:
        return self._chains * self._longest

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self._random = random.Random(self._seed)
        self._alive = set(range(len(self.candidates)))
        self.rounds: list[dict[str, Any]] = []

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        count = self._random.randint(0, min(self._chains, len(self._alive)))
        plan = []
        for which in self._random.sample(sorted(self._alive), count):
            some = self._random.sample(range(len(requests)), self._random.randint(1, len(requests)))
            plan.append(Chain(which, self._random.randint(1, self._longest), self._random.choice([None, tuple(some)])))
        self.rounds.append({"requests": list(requests), "plan": plan, "accepted": {}, "drafted": {}})
        return plan

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        assert list(requests) == self.rounds[-1]["requests"]
        self.rounds[-1] |= {"accepted": dict(accepted), "drafted": dict(drafted)}

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        self.rounds[-1] |= {"width": draft_length, "tokens": tokens}

    def drop(self, index: int) -> None:
        self._alive.discard(index)

    def finish(self) -> None: ...

    def account(self) -> Account:
        return Account(None, "at random")

    def forecast(self, batch: int, length: float) -> Account:
        return self.account()

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        return None


class Fixed(RandomPlans):
    """The same chains in every round."""

    def __init__(self, *plan: Chain) -> None:
        super().__init__(
            1 + max(chain.which for chain in plan), chains=len(plan), longest=max(c.draft_length for c in plan)
        )
        self._plan = plan

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        super().plan(requests, length, waiting)
        self.rounds[-1]["plan"] = list(self._plan)
        return self._plan


class Knowing(Drafter):
    """Knows what will be sampled, and says it right for a random number of tokens."""

    has_probabilities = False

    def __init__(self, answers: list[list[int]], seed: int, name: str = "custom") -> None:
        self.answers, self.random, self.strategy = answers, random.Random(seed), name
        self.right: list[dict[int, int]] = []  # by round and request

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        self.right.append({})
        drafts = []
        for request, done in zip(rows.indices, rows.generated.tolist(), strict=True):
            answer = (self.answers[request][done : done + draft_length] + [0] * draft_length)[:draft_length]
            right = self.random.randint(0, draft_length)
            drafts.append(answer[:right] + [(token + 1) % 64 for token in answer[right:]])
            self.right[-1][request] = right
        return Proposal(torch.tensor(drafts), torch.full_like(rows.lengths, draft_length))


def raced(control: RandomPlans) -> int:
    """Rounds in which some row had several chains."""
    return sum(
        any(sum(own[row] >= 0 for own in each["accepted"].values()) > 1 for row in range(len(each["requests"])))
        for each in control.rounds
    )
