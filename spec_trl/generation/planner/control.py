"""A control decides when drafters draft: it plans every decoding round, and records its result. `NeverSpeculate` and
`AlwaysSpeculate` ignore results; `planner.py` learns from them; a toggle of `papers/efficient_rollout` predicts by a
roofline. And when requests get free rows.
"""

import heapq
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


NO_METHOD = "none"  # plain decoding, where methods are named
MAX_EMPTY_ROUNDS = 0.25
"""Most rounds that waiting with empty rows may cost: an empty row costs a round divided by the number of rows. A
forward over several short prompts takes little longer than over one, so admitting several rows at once saves time. The
largest value that lengthened no simulated case by more than 0.2 %."""


class PlainRounds(NamedTuple):
    """`rounds` autoregressive rounds of `batch` rows of mean length `length`."""

    rounds: float
    batch: int
    length: float


@dataclass(frozen=True)
class Explanation:
    """A control's prediction for a rollout, and the reason why its rows drafted or did not, in one sentence."""

    # Over plain decoding: mean over drafted rounds, or without any the largest prediction. None: nothing is predicted.
    predicted_speedup: float | None
    reason: str

    @classmethod
    def too_many_rows(cls, batch: int, max_rows: int) -> "Explanation":
        return cls(None, f"more rows ({batch}) than the drafter's kernels serve ({max_rows})")


FAILED = "the drafter failed"  # the engine has already warned of the error


def promise(name: str, speedup: float, batch: int, length: float, by: str = "predicted") -> str:
    """Says the predicted speedup of `name` for a round of `batch` rows of mean length `length`."""
    return f"{name} {by} {speedup:.2f}× at {batch} {'row' if batch == 1 else 'rows'} × {length:.0f} tokens"


def decision(speedup: float, margin: float) -> str:
    if speedup >= 1 + margin:
        return "speculating"
    asked = f", since efficient_rollout.margin asks for {1 + margin:.2f}×" if speedup >= 1 else ""
    return f"decoding plainly{asked}"


@dataclass
class Candidate:
    """A drafter, described for a control."""

    name: str  # its strategy
    draft_length: int  # γ
    block_efficiency: float  # τ_prev, of the drafter's last rollout; at first the expected τ
    max_rows: int  # most rows that the drafter's kernels serve
    is_network: bool = True  # False: drafts are looked up, and cost no forward


@dataclass
class Tally:
    """Counts of one candidate in one rollout."""

    rounds: int = 0  # with its drafts
    blocks: int = 0  # rows verified, summed over the rounds
    tokens: int = 0  # committed
    seconds: float = 0.0  # of the rounds
    baseline_seconds: float = 0.0  # estimate for autoregressive rounds with the same tokens
    predicted_sum: float = 0.0  # of the predicted speedups
    predicted_rounds: int = 0  # rounds that had one

    def add_round(self, rows: int, tokens: int, seconds: float) -> None:
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
        return self.predicted_sum / self.predicted_rounds if self.predicted_rounds else None

    @property
    def measured_speedup(self) -> float | None:
        """Speedup over the autoregressive time; None: unknown, or no rounds."""
        return self.baseline_seconds / self.seconds if self.baseline_seconds and self.seconds else None


@dataclass(frozen=True)
class Chain:
    """A chain of draft tokens for each of some rows."""

    drafter: int  # index among the candidates
    draft_length: int  # γ
    rows: tuple[int, ...] | None = None  # of the batch; None: all


class Control(ABC):
    """Decides in every round the candidates that draft, their rows, and how far.

    A rollout calls `begin`; in every round `plan`, `record_rows` (if it drafted) and `record`; and in the end
    `finish`, unless an error ends it.
    """

    candidates: Sequence[Candidate]
    tallies: list[Tally]
    several_chains = False  # whether a row may get chains of several candidates in one round
    # Whether every row commits as many tokens as the row that accepts least; the rollout sets it before `begin`.
    in_step = False
    # Lookup drafters to evaluate on the committed text (`record_unverified`), and their number of tokens.
    compared_lookups: Sequence[int] = ()
    compared_length = 0

    @property
    def most_drafted(self) -> int:
        """Most draft tokens of a row in one round, over all its chains: the cache has columns for them."""
        return max(map(operator.attrgetter("draft_length"), self.candidates), default=0)

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        """Starts a rollout.

        Args:
            capacity: most rows at a time.
            prompts: keys of the requests' prompts, in the caller's order; equal prompts have equal keys.
        """
        return

    @abstractmethod
    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        """Returns the chains of a round; empty: decode autoregressively.

        The first of several chains of a row counts; under `several_chains` the one with most accepted tokens, among
        equals the first in the plan. The longest of several chains of one candidate counts. A row without a chain
        decodes autoregressively in the same round.

        Args:
            requests: index, in the caller's batch, of the request in each row; -1: an ended request, whose row stays.
            length: mean length of the rows.
            waiting: number of requests without a row.
        """

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        """Records the verdicts on a round's chains, before `record`; not called after autoregressive rounds.

        Args:
            requests: as passed to `plan`.
            accepted: by candidate, per row: accepted draft tokens, even if the row did not take them; -1: no chain.
            drafted: likewise drafted tokens, up to the row's end; may be fewer than γ.
        """
        return

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        """Records a planned round.

        Args:
            draft_length: most draft tokens verified in any row; less than planned where no row had more tokens left.
            seconds: duration.
            tokens: committed by all rows.
            is_typical: False if forwards were captured in the round, or ran eagerly before a capture: its seconds say
                nothing about later rounds.
        """
        return

    def record_unverified(
        self, drafter: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        """Records unverified drafts of candidate `drafter`, judged against the text of `requests`: `accepted` of
        `attempted` tokens were right."""
        return

    def spend(self, seconds: float) -> bool:
        """Takes `seconds` from the exploration budget; False: the budget holds less. True without a budget."""
        return True

    @abstractmethod
    def drop(self, index: int) -> None:
        """Excludes the failed candidate `index` for the rest of this rollout."""

    def limit(self, index: int, max_rows: int) -> None:
        """Lowers the most rows of candidate `index` to `max_rows`, as its kernels' first draft has measured."""
        for candidate in self.candidates[index : index + 1]:
            candidate.max_rows = min(candidate.max_rows, max_rows)

    def finish(self) -> None:
        return

    def explain(self) -> Explanation:
        return Explanation(sum(self.tallies, Tally()).predicted_speedup, f"decided by {type(self).__name__}")

    def forecast(self, batch: int, length: float) -> Explanation:
        """Explains a future rollout of `batch` rows of mean length `length`."""
        return self.explain()

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        """Estimates the seconds of these autoregressive rounds; None: too little is known."""
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


# ---- when free rows are given to waiting requests, and the rounds that plain decoding would have run ----------------


class AdmissionDelay:
    """Delays free rows until several requests can enter, whose prompts are then read together.

    Args:
        capacity: number of all rows.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._empty = 0  # sum over rounds of empty rows, since the last admission

    def rounds(self, free: int, in_flight: Collection[str], upcoming: str | None) -> int:
        """Rounds to wait before `free` rows are filled. Returns 0, and resets the count, if no row decodes, or if the
        key of the next prompt, `upcoming` (None: unknown), is among those `in_flight`: its K/V exists."""
        left = math.ceil((MAX_EMPTY_ROUNDS * self._capacity - self._empty) / free) - 1
        if left > 0 and in_flight and upcoming not in in_flight:
            return left
        self._empty = 0
        return 0

    def waits(self, free: int, in_flight: Collection[str], upcoming: str | None) -> bool:
        """Whether `free` rows stay empty for the next round, and counts it."""
        if not self.rounds(free, in_flight, upcoming):
            return False
        self.wait(free, 1)
        return True

    def wait(self, free: int, rounds: int) -> None:
        """Counts `rounds` rounds with `free` empty rows."""
        self._empty += free * rounds


def plain_rounds(
    prompts: Sequence[tuple[int, str]], tokens: Sequence[int], capacity: int, done: int = 0
) -> list[PlainRounds]:
    """Rounds of plain decoding, between changes of the batch.

    Args:
        prompts: tokens of each request when its first round begins, and its prompt's key.
        tokens: by request, tokens from rounds; with 0 the row is free again at once.
        capacity: rows; further requests wait in order.
        done: rounds to leave out at the beginning.
    """
    rounds: list[PlainRounds] = []
    # A heap of (round in which it ends, length that it would have had in round 0, key).
    rows: list[tuple[int, int, str]] = []
    delay, now, admitted, lengths = AdmissionDelay(capacity), 0, 0, 0
    while rows or admitted < len(prompts):
        free, wait = capacity - len(rows), 0
        if free and admitted < len(prompts):
            wait = delay.rounds(free, {key for *_, key in rows}, prompts[admitted][1])
        while not wait and admitted < len(prompts) and len(rows) < capacity:
            start = prompts[admitted][0] - now
            heapq.heappush(rows, (now + tokens[admitted], start, prompts[admitted][1]))
            lengths += start
            admitted += 1
        end, first = min(rows[0][0], now + (wait or rows[0][0])), max(now, done)
        delay.wait(free if wait else 0, end - now)
        if end > first:
            rounds.append(PlainRounds(end - first, len(rows), lengths / len(rows) + (first + end - 1) / 2))
        now = end
        while rows and rows[0][0] == now:
            lengths -= heapq.heappop(rows)[1]
    return rounds
