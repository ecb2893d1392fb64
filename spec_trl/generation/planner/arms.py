"""The choices of the planner, and the one that it has made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .control import Chain
from .ledger import Bools, Floats, Integers, Terms


class Arm(NamedTuple):
    """One choice for a round: (candidate, γ) by chain; empty: decode autoregressively."""

    chains: tuple[tuple[int, int], ...]
    race: bool = False  # rows get all chains; else a row gets the best chain for it

    @property
    def width(self) -> int:
        """Most draft tokens of a row."""
        lengths = [0, *(length for _, length in self.chains)]
        return sum(lengths) if self.race else max(lengths)


PLAIN = Arm(())


class ArmTable(NamedTuple):
    """Quantities of A arms that are constant while the number of rows is."""

    arms: tuple[Arm, ...]
    seconds: Floats  # [A, B], predicted of rounds of 1 to B rows
    plain: float  # of an autoregressive round of B rows
    shares: list[tuple[float, ...]]  # of each arm's round that its chains add, see `Terms`
    terms: Terms  # by which seconds are corrected
    untried: Floats  # [A], variance of log seconds beyond the ledger's while a method was never measured
    waits: Bools  # [A], whether another arm must measure its method first
    most: Floats  # [A], log of the most tokens that a round may commit for a row: γ + 1
    drafters: Integers  # [A, 2], the first and the last candidate
    places: Integers  # [A, 2], of these at their γ in `Drafts.variances`


@dataclass
class CurrentPlan:
    """The plan of the current rounds, and the rounds that are not in the ledger yet."""

    arm: Arm = PLAIN
    requests: list[int] = field(default_factory=list)
    waiting: bool = False  # whether requests wait for a row
    shares: tuple[float, ...] = ()  # of the round that each chain adds, see `Terms`
    predicted: float = math.nan  # seconds of a round
    plain: float = math.nan  # expected seconds of an autoregressive round
    gain: float = math.nan  # expected, of the tokens per second
    width: int = 0  # most draft tokens of a row
    chains: tuple[Chain, ...] = ()
    lasts: float = 0.0  # seconds of rounds after which a new plan is made
    passed: float = 0.0  # seconds of its rounds
    failed: bool = False  # whether a drafter did: the round is of no kind, and has no verdicts
    measured: list[tuple[float, int]] = field(default_factory=list)  # seconds and tokens of each round
    # Of each round that drafted: accepted and drafted tokens, by candidate, of each row.
    verdicts: list[tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]] = field(default_factory=list)

    @property
    def going(self) -> int:
        """Number of rows that have not ended."""
        return len(self.requests) - self.requests.count(-1)

    @property
    def loses(self) -> bool:
        """Whether drafts so far took longer than autoregressive rounds for the same tokens."""
        if not self.chains or not self.measured:
            return False
        seconds, tokens = map(sum, zip(*self.measured, strict=True))
        return seconds * self.going > tokens * self.plain
