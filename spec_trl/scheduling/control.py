"""A control decides when drafters draft: it plans each decoding round, and learns what the round did.

`NeverSpeculate` and `AlwaysSpeculate` ignore what rounds did; `planner.py` learns from it, and
`efficient_rollout/toggle.py` goes by a roofline.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..papers import load
from .admission import PlainRounds


NO_METHOD = "none"  # plain decoding, where methods are named
RoundSeconds: TypeAlias = Callable[[Mapping[str, int], int, int, float], float]
"""Predicted seconds of a round: by γ of each drafter, most draft tokens of a row, rows, and their mean length."""


@dataclass(frozen=True)
class Explanation:
    """What a control predicted for a rollout, and why its rows drafted or did not."""

    # Over plain decoding: the mean over the rounds that drafted or, where none did, the largest prediction. None:
    # nothing is predicted.
    predicted_speedup: float | None
    reason: str  # one sentence

    @classmethod
    def too_many_rows(cls, batch: int, max_rows: int) -> "Explanation":
        """Why nothing drafts for `batch` rows."""
        return cls(None, f"more rows ({batch}) than the drafter's kernels serve ({max_rows})")


FAILED = "the drafter failed"  # the engine has already warned of the error


def promise(name: str, speedup: float, batch: int, length: float, by: str = "predicted") -> str:
    """The speedup that `name` promises for a round of `batch` rows of mean length `length`."""
    return f"{name} {by} {speedup:.2f}× at {batch} {'row' if batch == 1 else 'rows'} × {length:.0f} tokens"


def decision(speedup: float, margin: float) -> str:
    """What follows from a promised speedup."""
    if speedup >= 1 + margin:
        return "speculating"
    asked = f", since sd_margin asks for {1 + margin:.2f}×" if speedup >= 1 else ""
    return f"decoding plainly{asked}"


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
    # Lookups whose unverified drafts the engine compares with the text (`record_unverified`), and how many tokens.
    compared_lookups: Sequence[int] = ()
    compared_length = 0

    @property
    def most_drafted(self) -> int:
        """Most draft tokens of a row in one round, over all its chains: cache columns are allotted for them."""
        return max(map(operator.attrgetter("draft_length"), self.candidates), default=0)

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

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        """Records the verdicts on a round's chains, before `record`; not called after autoregressive rounds.

        Args:
            requests: those that the plan was made for.
            accepted: by candidate, per row: draft tokens accepted, whether or not its chain won; -1: it had none.
            drafted: likewise tokens drafted, up to the row's end; fewer than γ, or 0, where it knew no more.
        """
        return

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        """Records a planned round.

        Args:
            draft_length: most draft tokens verified in any row; less than planned where no row had more tokens left.
            seconds: of the round.
            tokens: committed, all rows together.
            is_typical: False where forwards were captured in the round, or ran eagerly before they are: its seconds
                say nothing of later rounds.
        """
        return

    def record_unverified(
        self, which: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        """Records drafts of candidate `which` that no forward verified, judged by the text of `requests`: of
        `attempted` tokens `accepted` were right."""
        return

    def spend(self, seconds: float) -> bool:
        """Takes `seconds` from the exploration budget; False: the budget holds less. A control without a budget pays
        all."""
        return True

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        """A method with which a free rank may race for some of `requests`, and for which; None: no race pays.
        `helpers`: the ranks that race already, by request and method."""
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

    def explain(self) -> Explanation:
        """Of the newest rollout."""
        return Explanation(sum(self.tallies, Tally()).predicted_speedup, f"decided by {type(self).__name__}")

    def forecast(self, batch: int, length: float) -> Explanation:
        """The same before any rollout, for one of `batch` rows of mean length `length`."""
        return self.explain()

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        """Seconds that these autoregressive rounds would take, by what is known of them so far; None: too little
        is."""
        return None


class NeverSpeculate(Control):
    """Decodes autoregressively, for `reason`."""

    candidates: Sequence[Candidate] = ()
    tallies: list[Tally] = []

    def __init__(self, reason: str = "no drafter") -> None:
        self._reason = reason

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        return ()

    def drop(self, index: int) -> None:
        return

    def explain(self) -> Explanation:
        return Explanation(None, self._reason)


class AlwaysSpeculate(Control):
    """Speculates in every round that its drafter's kernels can serve: the paper's always-on quantized self-SD."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidates: Sequence[Candidate] = (candidate,)
        self._batch = 0
        self.begin(0, ())

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self.tallies = [Tally()]
        self._failed = False

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        self._batch, (candidate,) = len(requests), self.candidates
        if self._failed or self._batch > candidate.max_rows:
            return ()
        return (Chain(0, candidate.draft_length),)

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if draft_length == self.candidates[0].draft_length:  # less: a rollout's last rounds
            self.tallies[0].add_round(self._batch, tokens, seconds)

    def drop(self, index: int) -> None:
        self._failed = True

    def explain(self) -> Explanation:
        return Explanation(None, FAILED) if self._failed else self.forecast(self._batch, 0.0)

    def forecast(self, batch: int, length: float) -> Explanation:
        most = self.candidates[0].max_rows
        return Explanation.too_many_rows(batch, most) if batch > most else Explanation(None, "sd_toggle=always")
