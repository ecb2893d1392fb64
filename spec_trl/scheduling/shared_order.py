"""The order in which ranks decode a pool: the longest requests first, by earlier completions of their prompts.

A long request that begins last leaves all other ranks waiting for it; RhymeRL, Seer and DAS order theirs likewise.
With noise keyed by request the order cannot be seen in a token.
"""

from collections.abc import Sequence
from statistics import fmean


class ExpectedLengths:
    """Tokens that a completion of a prompt will have: the mean of those of the newest rollout that had the prompt."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def record(self, lengths: dict[str, list[int]]) -> None:
        """Takes the lengths, in tokens, of one rollout's completions, by a key of the prompt."""
        self._means |= {prompt: fmean(own) for prompt, own in lengths.items()}

    def of(self, prompts: Sequence[str]) -> list[float]:
        """Expected tokens of a completion of each of `prompts`; of a new one as many as of the others on average."""
        known = [self._means[prompt] for prompt in dict.fromkeys(prompts) if prompt in self._means]
        mean = fmean(known) if known else 0.0
        return [self._means.get(prompt, mean) for prompt in prompts]


def longest_first(prompts: Sequence[str], expected: Sequence[float]) -> list[int]:
    """Indices of requests, the longest `expected` first; those of one prompt next to each other, since a rank that
    takes several of them reads the prompt once."""
    first = {prompt: index for index, prompt in reversed(list(enumerate(prompts)))}
    return sorted(range(len(prompts)), key=lambda index: (-expected[index], first[prompts[index]], index))


def dealt(order: Sequence[int], rank: int, ranks: int, rows: int) -> list[int]:
    """The first `rows` requests of `rank`: those of every round of dealing, which goes back and forth among `ranks`.

    Each rank so begins with as much work as another; the completions of a prompt, which are of like length, are spread
    over ranks, each of which reads the prompt."""
    places = (round_ * ranks + (ranks - 1 - rank if round_ % 2 else rank) for round_ in range(rows))
    return [order[place] for place in places if place < len(order)]
