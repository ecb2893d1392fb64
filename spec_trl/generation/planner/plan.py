"""Defines a plan of a round, and holds the current plan with its measured rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .control import Chain


class Plan(NamedTuple):
    """A way to decode a round, for all its rows. Without drafters: autoregressively."""

    drafters: tuple[str, ...] = ()  # strategies; of two, rows get the better one for them, or race
    draft_lengths: tuple[int, ...] = ()  # γ by drafter
    on_all_rows: bool = False  # whether all rows get a chain of each drafter

    @property
    def width(self) -> int:
        """Most draft tokens of a row."""
        return sum(self.draft_lengths) if self.on_all_rows else max(self.draft_lengths, default=0)

    @property
    def by_drafter(self) -> dict[str, int]:
        return dict(zip(self.drafters, self.draft_lengths, strict=True))


PLAIN = Plan()


@dataclass
class CurrentPlan:
    """The plan of the current rounds, and the rounds that the clock has not recorded yet."""

    plan: Plan = PLAIN
    requests: list[int] = field(default_factory=list)
    waiting: bool = False  # whether requests wait for a row
    plain: float = 0.0  # expected seconds of an autoregressive round
    gain: float = 0.0  # expected, of the tokens per second
    width: int = 0  # most draft tokens of a row
    chains: tuple[Chain, ...] = ()
    lasts: float = 0.0  # seconds until the next plan is made
    passed: float = 0.0  # seconds of its rounds
    failed: bool = False  # whether a drafter failed: seconds and verdicts of the round are then invalid
    measured: list[tuple[float, int]] = field(default_factory=list)  # seconds and tokens by round
    # By drafted round: accepted and drafted tokens by candidate and row.
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
