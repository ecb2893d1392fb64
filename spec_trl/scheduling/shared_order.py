"""The order in which ranks decode a pool: the longest requests first, by earlier completions of their prompts.

A long request that begins last leaves all other ranks waiting for it; RhymeRL, Seer and DAS order theirs likewise.
With noise keyed by request the order cannot be seen in a token.
"""

from collections.abc import Sequence
from itertools import groupby
from math import gcd
from statistics import fmean
from typing import TypeVar


T = TypeVar("T")


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


def longest_first(prompts: Sequence[str], expected: Sequence[float], rows: int) -> list[list[int]]:
    """What ranks take at once, as indices of requests, the longest `expected` first: completions of one prompt, so
    many that they fill the `rows` of a rank evenly. A rank that takes all of a prompt is the only one to read it."""
    first = {prompt: index for index, prompt in reversed(list(enumerate(prompts)))}
    order = sorted(range(len(prompts)), key=lambda index: (-expected[index], first[prompts[index]], index))
    by_prompt = [list(own) for _, own in groupby(order, prompts.__getitem__)]
    at_once = gcd(max(map(len, by_prompt)), rows)
    return [own[place : place + at_once] for own in by_prompt for place in range(0, len(own), at_once)]


def dealt(order: Sequence[T], rank: int, ranks: int, rounds: int) -> list[T]:
    """What `rank` gets of `order` when it is dealt in so many `rounds`, which go back and forth among `ranks`: each
    rank begins with as much work as another."""
    places = (round_ * ranks + (ranks - 1 - rank if round_ % 2 else rank) for round_ in range(rounds))
    return [order[place] for place in places if place < len(order)]
