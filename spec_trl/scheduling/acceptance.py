"""Acceptance as two rates: one of a chain's first token, one of its further tokens.

One rate p for all positions, as in SA's ladder, is right for networks and overrates lookups, which find the right
passage or a wrong one: 10 of 10 accepted in one round and none in the next are 6 tokens per round, but 10 of 11 judged
positions would say 7.1 at γ = 10. Two rates, 1/2 for the first token and 1 for the others, give τ = 6.
"""

from typing import NamedTuple

from ..efficient_rollout.draft_length import expected_block_efficiency


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
