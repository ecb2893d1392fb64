"""Acceptance as two rates: one of a chain's first token, one of its further tokens.

One rate p for all positions, as in SA's ladder, fits networks and overrates lookups, which find the right passage or a
wrong one: 10 of 10 accepted in one round and none in the next are 6 tokens per round, but 10 of 11 judged positions
would say 7.1 at γ = 10. Two rates, 1/2 for the first token and 1 for the others, give τ = 6.
"""

from functools import lru_cache
from typing import NamedTuple


MAX_DRAFT_LENGTH = 64


@lru_cache(maxsize=1 << 14)  # planners use the same few values repeatedly
def expected_block_efficiency(acceptance: float, draft_length: int) -> float:
    """τ = (1 - α^(γ+1)) / (1 - α): tokens per block, bonus included, when draft tokens are accepted independently with
    probability α (Leviathan et al. 2023, Eq. 1)."""
    return sum(acceptance**k for k in range(draft_length + 1))


def acceptance_of(block_efficiency: float, draft_length: int) -> float:
    """α that explains `block_efficiency` at `draft_length`: the inverse of :func:`expected_block_efficiency`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_block_efficiency(middle, draft_length) < block_efficiency:
            low = middle
        else:
            high = middle
    return high


class Acceptance(NamedTuple):
    """Probabilities, 0 to 1, that a chain's `first` draft token is accepted, and that a `further` token is accepted
    after accepted ones."""

    first: float
    further: float

    @classmethod
    def geometric(cls, probability: float) -> "Acceptance":
        """The same rate for all positions (Leviathan et al. 2023; SA's p)."""
        return cls(probability, probability)

    def block_efficiency(self, draft_length: int) -> float:
        """τ of γ = `draft_length`: expected tokens of a round, bonus included."""
        return 1.0 + self.first * expected_block_efficiency(self.further, draft_length - 1)
