"""A row's tokens and K/V, saved where the row leaves and restored where it goes on: in a later round (preemption), on
another rank, or in the next turn of a conversation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from .kv.base import KVCache, RowKV


TARGET = "the target"
"""The target, as an owner of K/V."""
SavedKV: TypeAlias = dict[str, tuple[int, Callable[[], RowKV]]]
"""By owner, :data:`TARGET` or a drafter's strategy: the first column that its forwards must compute, and a function
that returns the K/V, and waits if another rank still sends it."""


@dataclass(frozen=True)
class SavedRow:
    """What a row has, besides its request.

    Args:
        tokens: `[n]` int64, generated; None: no token was generated, or all are in the request's prompt.
        logprobs: `[n]` float32 of `tokens`; None: not wanted.
        first: first column with saved K/V; earlier columns are computed again.
        kv: an owner that is missing computes all columns.
    """

    tokens: Tensor | None
    logprobs: Tensor | None
    first: int
    kv: SavedKV

    def restore(self, row: int, owner: str, cache: KVCache) -> int:
        """Writes the K/V of `owner` to `row` of its `cache`; returns the first column that a forward must compute."""
        if owner not in self.kv:
            return 0
        end, states = self.kv[owner]
        cache.import_row(row, self.first, states())
        return end

    @property
    def bytes(self) -> int:
        """Bytes of K/V."""
        layers = [pair for _, states in self.kv.values() for pair in states().values()]
        return sum(part.nbytes for pair in layers for part in pair)
