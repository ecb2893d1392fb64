"""How far drafts get: the first token of a chain, and the further ones, each have a rate of their own.

One rate p for all positions, as in SA's ladder, serves networks. Lookups it overrates: they find the right passage or
a wrong one, so that 10 of 10 accepted in one round and none in the next are 6 tokens per round, where 10 of 11 judged
positions would say 7.1 at γ = 10. With two rates it is 1/2 for the first token and 1 for the others: τ = 6.
"""

from dataclasses import dataclass
from typing import NamedTuple

from .draft_length import expected_block_efficiency


class Acceptance(NamedTuple):
    """Probabilities that a chain's first draft token is accepted, and that each `further` one is, when those before it
    were; 0 to 1."""

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
    """Draft positions that had a verdict, of which so many were accepted; fractions where rounds fade."""

    first_accepted: float = 0.0
    first: float = 0.0
    further_accepted: float = 0.0
    further: float = 0.0

    @classmethod
    def expecting(cls, acceptance: Acceptance, weight: float) -> "AcceptanceCounts":
        """As if `weight` positions of each kind had come out as `acceptance` says."""
        return cls(acceptance.first * weight, weight, acceptance.further * weight, weight)

    @classmethod
    def of_round(cls, accepted: int, attempted: int) -> "AcceptanceCounts":
        """A round in which `accepted` draft tokens were, of `attempted` that had a verdict: those accepted and, where
        one was refused or left out by a drafter that had nothing to propose there, that one.

        Raises:
            ValueError: the counts are not 0 ≤ accepted ≤ attempted.
        """
        if not 0 <= accepted <= attempted:
            raise ValueError(f"accepted={accepted} of attempted={attempted} is out of range; it must be 0 to that.")
        return cls(min(accepted, 1), min(attempted, 1), max(accepted - 1, 0), max(attempted - 1, 0))

    def add(self, other: "AcceptanceCounts", decay: float = 1.0) -> None:
        """Adds `other`; what was counted before then weighs `decay`."""
        self.first_accepted = decay * self.first_accepted + other.first_accepted
        self.first = decay * self.first + other.first
        self.further_accepted = decay * self.further_accepted + other.further_accepted
        self.further = decay * self.further + other.further

    def fade(self, decay: float) -> None:
        """All counts weigh `decay` of what they did."""
        self.add(AcceptanceCounts(), decay)

    def rates(self, prior: Acceptance, weight: float) -> Acceptance:
        """The rates, each drawn towards that of `prior` as if by `weight` positions, above 0."""
        return Acceptance(
            (self.first_accepted + weight * prior.first) / (self.first + weight),
            (self.further_accepted + weight * prior.further) / (self.further + weight),
        )
