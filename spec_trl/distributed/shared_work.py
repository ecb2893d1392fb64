"""Orders the requests that ranks take, and chooses the rows to move to a rank without rows.

The longest requests go first, by earlier completions of their prompts: all ranks would wait for a long request that
begins last (RhymeRL, Seer and DAS use the same order). The tail of a moving row's K/V (SA §4.3) is sent while the
other rank computes the head again, so that both end at the same time. No token depends on either.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from statistics import fmean
from typing import TypeVar

from ..generation.planner.clock import AffineSeconds, fit_affine


T = TypeVar("T")


class ExpectedLengths:
    """Predicts the tokens of a completion: the mean of the newest rollout with the same prompt."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def record(self, lengths: dict[str, list[int]]) -> None:
        """Records the lengths, in tokens, of a rollout's completions, by a key of the prompt."""
        self._means |= {prompt: fmean(own) for prompt, own in lengths.items()}

    def of(self, prompts: Sequence[str]) -> list[float]:
        """Expected tokens of a completion by prompt; for a new prompt the average of the others."""
        known = [self._means[prompt] for prompt in dict.fromkeys(prompts) if prompt in self._means]
        mean = fmean(known) if known else 0.0
        return [self._means.get(prompt, mean) for prompt in prompts]


def longest_first(prompts: Sequence[str], expected: Sequence[float], rows: int) -> list[list[int]]:
    """Groups of request indices that a rank takes at once, the longest `expected` first: completions of one prompt, in
    numbers that fill the `rows` of a rank evenly. A prompt whose completions one rank takes is read only there."""
    first = {prompt: index for index, prompt in reversed(list(enumerate(prompts)))}
    order = sorted(range(len(prompts)), key=lambda index: (-expected[index], first[prompts[index]], index))
    by_prompt = [list(own) for _, own in groupby(order, prompts.__getitem__)]
    at_once = gcd(max(map(len, by_prompt)), rows)
    return [own[place : place + at_once] for own in by_prompt for place in range(0, len(own), at_once)]


def dealt(order: Sequence[T], rank: int, ranks: int, rounds: int) -> list[T]:
    """The part of `order` that `rank` gets when it is dealt in `rounds` rounds, back and forth among `ranks`: all
    ranks begin with equal work."""
    places = (round_ * ranks + (ranks - 1 - rank if round_ % 2 else rank) for round_ in range(rounds))
    return [order[place] for place in places if place < len(order)]


def dealt_to_holders(
    order: Sequence[Sequence[int]], holders: Mapping[int, int], ranks: int, rounds: int
) -> list[Sequence[int]]:
    """`order`, changed so that :func:`dealt` gives groups to the rank that holds K/V of their first request
    (`holders`), as far as that rank has rows for them."""
    left, dealt_first = list(order), min(rounds * ranks, len(order))
    arranged: list[Sequence[int] | None] = [None] * dealt_first
    places = {place: rank for rank in range(ranks) for place in dealt(range(dealt_first), rank, ranks, rounds)}
    for place in range(dealt_first):
        mine = next((group for group in left if holders.get(group[0]) == places[place]), None)
        if mine is not None:
            left.remove(mine)
            arranged[place] = mine
    return [left.pop(0) if group is None else group for group in arranged] + left


@dataclass(frozen=True)
class MoveCosts:
    """Seconds per token of a row's K/V: to `compute` it again, and to `send` it (None: unknown)."""

    compute: float
    send: float | None

    @property
    def head_share(self) -> float:
        """Share of columns to compute again, so that computing takes as long as sending the rest; else a half."""
        return 0.5 if self.send is None else self.send / (self.send + self.compute)

    def seconds(self, tokens: int) -> float:
        """Seconds to move the K/V of `tokens` tokens."""
        return tokens * self.compute * self.head_share


def measured_send_seconds(tokens: int, computing: float, waiting: float) -> float | None:
    """Seconds per token of K/V that was sent.

    Args:
        computing: seconds of computing the head meanwhile.
        waiting: seconds that the receiver then waited. If almost 0, sending took less than computing; half is assumed,
            so that the next move sends more.
    """
    if not tokens:
        return None
    return (computing / 2 if waiting < computing / 100 else computing + waiting) / tokens


def step_seconds(rounds: Iterable[tuple[int, int, float]]) -> AffineSeconds:
    """Seconds per token of a row in a batch.

    Args:
        rounds: (rows, committed tokens of all rows, seconds) of measured rounds, at least one.
    """
    return fit_affine([(batch, seconds * batch / tokens, tokens / batch) for batch, tokens, seconds in rounds])


def rows_to_give(lengths: Sequence[int], steps: float, step: AffineSeconds, costs: MoveCosts) -> int:
    """Number of rows to send, the shortest ones; 0: none.

    Both ranks should end as early as possible: this rank after the rows that stay, the other rank after the move and
    the moved rows. Beside its K/V a move costs both about a round: this rank copies the rows, the other rank admits
    them by a separate forward.

    Args:
        lengths: tokens by row, prompts included, ascending.
        steps: expected remaining tokens by row.
        step: of :func:`step_seconds`, on either rank.
    """
    batch, moved = len(lengths), 0
    best, best_seconds = 0, steps * step(batch)
    for count in range(1, batch):
        moved += lengths[count - 1]
        seconds = max((steps + 1) * step(batch - count), costs.seconds(moved) + (steps + 1) * step(count))
        if seconds < best_seconds:
            best, best_seconds = count, seconds
    return best
