"""What a planner chooses among, and the plan that it keeps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .control import Chain
from .ledger import Bools, Floats, Integers, Terms


@dataclass(frozen=True)
class Arm:
    """One thing that a round may be."""

    chains: tuple[tuple[int, int], ...] = ()  # (candidate, γ) each; none: decode autoregressively
    race: bool = False  # rows get all chains; else each row the best one for it

    @property
    def width(self) -> int:
        """Most draft tokens of a row."""
        return (sum if self.race else max)([length for _, length in self.chains] or [0])


PLAIN = Arm()


class Table(NamedTuple):
    """What does not change from round to round while the number of rows stays."""

    arms: tuple[Arm, ...]
    seconds: Floats  # [arms, B], predicted of rounds of 1 to B rows
    plain: float  # of an autoregressive round of B rows
    terms: Terms  # by which seconds are corrected
    untried: Floats  # [arms], variance of log seconds beyond the ledger's while a method was never measured
    waits: Bools  # [arms], whether another arm must first tell of a method that was never measured
    most: Floats  # [arms], log of the most tokens that a round may commit for a row: γ + 1
    drafts: Integers  # [arms, 2], places of their drafters at their γ in `Drafts.variances`


@dataclass
class Kept:
    """A plan that is kept, and what its rounds did since the ledger was told."""

    arm: Arm
    requests: list[int]
    waiting: bool
    width: int = 0  # most draft tokens of a row
    shares: tuple[float, ...] = ()  # of the round that each chain adds, see `Terms`
    predicted: float = math.nan  # seconds of a round
    chains: tuple[Chain, ...] = ()
    lasts: float = 0.0  # seconds of rounds after which another one is made
    passed: float = 0.0  # seconds of its rounds
    failed: bool = False  # whether a drafter did: the round is of no kind, and its verdicts are none
    plain: float = math.nan  # seconds of an autoregressive round instead, by what was known
    gain: float = math.nan  # expected, of the tokens per second
    measured: list[tuple[float, int]] = field(default_factory=list)  # seconds and tokens of each round
    verdicts: list[tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]] = field(default_factory=list)

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.requests)

    @property
    def loses(self) -> bool:
        """Whether drafts took longer, so far, than autoregressive rounds for the same tokens."""
        seconds, tokens = map(sum, zip(*self.measured, strict=True)) if self.measured else (0.0, 0)
        return bool(self.chains) and seconds * self.batch > tokens * self.plain
