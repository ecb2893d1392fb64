"""Acceptance as two rates: one of a chain's first token, one of its further tokens.

One rate p for all positions, as in SA's ladder, is right for networks and overrates lookups, which find the right
passage or a wrong one: 10 of 10 accepted in one round and none in the next are 6 tokens per round, but 10 of 11 judged
positions would say 7.1 at γ = 10. Two rates, 1/2 for the first token and 1 for the others, give τ = 6.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .draft_length import expected_block_efficiency


class Acceptance(NamedTuple):
    """Probability, 0 to 1, that a chain's `first` draft token is accepted, and that each `further` one is if those
    before it were."""

    first: float
    further: float

    @classmethod
    def geometric(cls, probability: float) -> "Acceptance":
        """The same for all positions (Leviathan et al. 2023; SA's p)."""
        return cls(probability, probability)

    def block_efficiency(self, draft_length: int) -> float:
        """τ of γ = `draft_length`: expected tokens of a round, bonus included."""
        return 1.0 + self.first * expected_block_efficiency(self.further, draft_length - 1)


@dataclass
class AcceptanceCounts:
    """Number of draft positions that had a verdict, and of those accepted; fractions, since old rounds fade."""

    first_accepted: float = 0.0
    first: float = 0.0
    further_accepted: float = 0.0
    further: float = 0.0

    @classmethod
    def expecting(cls, acceptance: Acceptance, weight: float) -> "AcceptanceCounts":
        """Counts of `weight` positions of each kind at the rates of `acceptance`."""
        return cls(acceptance.first * weight, weight, acceptance.further * weight, weight)

    @classmethod
    def of_round(cls, accepted: int, attempted: int) -> "AcceptanceCounts":
        """Counts of a round; `attempted` is `accepted`, and one more where a token was refused or the drafter had
        nothing to propose. ValueError unless 0 ≤ accepted ≤ attempted."""
        if not 0 <= accepted <= attempted:
            raise ValueError(f"accepted={accepted} of attempted={attempted} is out of range; it must be 0 to that.")
        return cls(min(accepted, 1), min(attempted, 1), max(accepted - 1, 0), max(attempted - 1, 0))

    def add(self, other: "AcceptanceCounts", decay: float = 1.0) -> None:
        """Multiplies the counts by `decay` and adds `other`."""
        self.first_accepted = decay * self.first_accepted + other.first_accepted
        self.first = decay * self.first + other.first
        self.further_accepted = decay * self.further_accepted + other.further_accepted
        self.further = decay * self.further + other.further

    def fade(self, decay: float) -> None:
        """Multiplies the counts by `decay`."""
        self.add(AcceptanceCounts(), decay)

    def rates(self, prior: Acceptance, weight: float) -> Acceptance:
        """The rates, each drawn towards that of `prior` as if by `weight` > 0 positions."""
        return Acceptance(
            (self.first_accepted + weight * prior.first) / (self.first + weight),
            (self.further_accepted + weight * prior.further) / (self.further + weight),
        )
