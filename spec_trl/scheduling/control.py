"""A control decides when drafters draft: it plans each decoding round, and is told what the round did.
`NeverSpeculate` and `AlwaysSpeculate` plan the same whatever they are told, `toggle.py` goes by a roofline, and
`planner.py` learns."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..papers import load
from .account import FAILED, Account, too_many_rows
from .plain_decoding import PlainRounds


NO_METHOD = "none"  # plain decoding, where methods are named
RoundSeconds: TypeAlias = Callable[[Mapping[str, int], int, int, float], float]
"""Predicted seconds of a round: by γ of each drafter, most draft tokens of a row, rows, and their mean length."""


@dataclass
class Candidate:
    """One drafter as a control sees it."""

    name: str  # its strategy
    draft_length: int  # γ
    block_efficiency: float  # τ_prev, of the last rollout that it drafted for; at first, what is expected
    max_rows: int  # most rows that its kernels serve
    is_network: bool = True  # False: drafts are looked up, and cost no forward


@dataclass
class Tally:
    """What one candidate did in one rollout."""

    rounds: int = 0  # in which it drafted
    blocks: int = 0  # rows verified, summed over the rounds
    tokens: int = 0  # committed
    seconds: float = 0.0  # of the rounds
    baseline_seconds: float = 0.0  # of autoregressive rounds for the same tokens, by what is known of them
    predicted_sum: float = 0.0  # of the predicted speedups
    predicted_rounds: int = 0  # rounds that had one

    def add_round(self, rows: int, tokens: int, seconds: float) -> None:
        """Counts a round of `rows` rows."""
        self.rounds += 1
        self.blocks += rows
        self.tokens += tokens
        self.seconds += seconds

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def block_efficiency(self) -> float | None:
        """τ, None without blocks."""
        return self.tokens / self.blocks if self.blocks else None

    @property
    def predicted_speedup(self) -> float | None:
        """Mean prediction over the rounds that had one."""
        return self.predicted_sum / self.predicted_rounds if self.predicted_rounds else None

    @property
    def measured_speedup(self) -> float | None:
        """Over the autoregressive time; None where that is not known, or without rounds."""
        return self.baseline_seconds / self.seconds if self.baseline_seconds and self.seconds else None


@dataclass(frozen=True)
class Chain:
    """A chain of draft tokens for each of some rows."""

    which: int  # index of the candidate that drafts it
    draft_length: int  # γ
    rows: tuple[int, ...] | None = None  # of the batch; None: all


class Control(ABC):
    """Decides in each round which candidates draft for which rows, and how far.

    A rollout is `begin`, then for each round `plan`, `record_rows` (after rounds that drafted) and `record`, and in
    the end `finish`, unless it ended in an error.
    """

    candidates: Sequence[Candidate]
    tallies: list[Tally]
    races = False  # whether a row may get chains of several candidates in one round
    listens_to: Sequence[int] = ()  # lookups of which it wants to be told what they would have drafted (`overheard`)
    most_listened = 0  # draft tokens of each that are compared

    @property
    def most_drafted(self) -> int:
        """Most draft tokens of a row in one round, over all its chains: cache columns are allotted for them."""
        return max((candidate.draft_length for candidate in self.candidates), default=0)

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        """A rollout starts.

        Args:
            capacity: most rows at a time.
            prompts: a key of each request's prompt, in the caller's order; equal prompts have equal keys.
        """
        return

    @abstractmethod
    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        """The chains of a round; none: decode autoregressively.

        A row that several candidates draft for is raced: of its chains the one with most accepted tokens counts, the
        first in the plan among equals; of several chains of one candidate the longest. A row without a chain decodes
        autoregressively next to the others.

        Args:
            requests: index, in the caller's batch, of the request in each row.
            length: mean length of the rows.
            waiting: number of requests that have no row yet.
        """

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        """Takes what the planned round did.

        Args:
            draft_length: most draft tokens verified in any row; less than planned where no row had room for more.
            seconds: of the round.
            tokens: committed, all rows together.
            is_typical: False where forwards were captured in the round, or ran eagerly before they are: its seconds
                say nothing of later rounds.
        """
        return

    def spend(self, seconds: float) -> bool:
        """Takes so many seconds from the account that trials are paid from; False: it does not hold them. A control
        without an account pays all."""
        return True

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        """Takes what became of the round's chains, before `record`; not called after autoregressive rounds.

        Args:
            requests: those that the plan was made for.
            accepted: by candidate, per row: draft tokens accepted, whether or not its chain won; -1: it had none.
            drafted: likewise tokens drafted, up to the row's end; fewer than γ, or 0, where it found no more.
        """
        return

    def overheard(
        self, which: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        """Records the acceptance of unverified drafts of candidate `which`, judged by the text of `requests`: of
        `attempted` tokens `accepted` were right."""
        return

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        """A method with which a free rank may race for some of `requests`, and for which; None: nothing is to be
        gained. `helpers`: the ranks that race already, by request and method."""
        return None

    def helper(self, which: int) -> "Control":
        """The control of rows for which this rank races, drafted for by candidate `which`."""
        helper: Control = load("specactor.assignment").RaceHelper(self, which)
        return helper

    @abstractmethod
    def drop(self, index: int) -> None:
        """Candidate `index` failed and must not be chosen again in this rollout."""

    def finish(self) -> None:
        """The rollout is over."""
        return

    def account(self) -> Account:
        """What was predicted for the newest rollout, and why it drafted or did not."""
        return Account(sum(self.tallies, Tally()).predicted_speedup, f"decided by {type(self).__name__}")

    def forecast(self, batch: int, length: float) -> Account:
        """The same before any rollout, for one of `batch` rows of mean length `length`."""
        return self.account()

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        """What these autoregressive rounds would take, by what is known of them so far; None: too little is."""
        return None


class OneDrafter(Control):
    """A control under which one drafter at a time drafts for all rows."""

    @abstractmethod
    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        """(index of the candidate, γ) of a round; γ = 0: decode autoregressively."""

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        which, draft_length = self.decide(len(requests), length, waiting)
        return (Chain(which, draft_length),) if draft_length else ()


class NeverSpeculate(OneDrafter):
    """Decodes autoregressively, for `reason`."""

    candidates: Sequence[Candidate] = ()
    tallies: list[Tally] = []

    def __init__(self, reason: str = "no drafter") -> None:
        self._reason = reason

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        return 0, 0

    def drop(self, index: int) -> None:
        pass

    def account(self) -> Account:
        return Account(None, self._reason)


class AlwaysSpeculate(OneDrafter):
    """Speculates in every round that its drafter's kernels can serve: the paper's always-on quantized self-SD."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidates: Sequence[Candidate] = (candidate,)
        self._batch = 0
        self.begin(0, ())

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self.tallies = [Tally()]
        self._failed = False

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        self._batch = batch
        candidate = self.candidates[0]
        return 0, 0 if self._failed or batch > candidate.max_rows else candidate.draft_length

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if draft_length == self.candidates[0].draft_length:  # less: a rollout's last rounds
            self.tallies[0].add_round(self._batch, tokens, seconds)

    def drop(self, index: int) -> None:
        self._failed = True

    def account(self) -> Account:
        return Account(None, FAILED) if self._failed else self.forecast(self._batch, 0.0)

    def forecast(self, batch: int, length: float) -> Account:
        most = self.candidates[0].max_rows
        return Account(None, too_many_rows(batch, most) if batch > most else "sd_toggle=always")
