"""Stores K/V of a copy of the target that drafts ahead of it."""

from typing import Any

import torch
from torch import Tensor

from ....generation.engine.kv.base import KVCache, Window
from ....generation.engine.kv.cache import RaggedCache, RaggedLayer


class TailCache(RaggedCache):
    """K/V of a copy of the target that drafts ahead of it (SA §4.1). The copy reads the target's columns of committed
    text, which stay as they are while it drafts, and writes K/V of later tokens into a tail:

        target's columns        t t t t t x x x .     row of L = 6 committed tokens; x: verification may write them
        tail, size 4                      d d d d     position t is column t % 4
                                          ^ L - 1, not computed by the target

    Committing moves no K/V: committed positions are read from the target's columns from then on. The target never
    reads the tail, so a drafter that fails, or hangs and resumes later, changes no token.

    Args:
        target: the target's cache; it must not be written in columns below L - 1 while a forward runs.
        committed: `[rows]` int64, L by row; the caller updates it in place.
        size: columns of the tail. A row's positions after them share the last one.
    """

    def __init__(self, target: KVCache, committed: Tensor, size: int) -> None:
        super().__init__(len(target.layers), target.rows, size)
        self.layers = [_TailLayer(self._window, layer) for layer in target.layers]
        self.columns = target.columns
        self._committed, self._size = committed, size

    def point_at(self, positions: Tensor, columns: int, first_row: int) -> None:
        heads = self._committed[first_row : first_row + len(positions), None] - 1  # [B, 1]
        visible = columns if heads.any() else 0  # if all texts have one token, the target may have no K/V yet
        column = torch.arange(visible, device=heads.device)  # [visible]
        tail = torch.arange(self._size, device=heads.device)  # [size]
        unseen = torch.iinfo(torch.int64).max  # later than any query
        self.key_positions = torch.cat(
            [torch.where(column < heads, column, unseen), heads + (tail - heads) % self._size], dim=1
        )  # [B, visible + size]
        places = torch.minimum(positions, heads + self._size - 1) % self._size  # [B, q]
        super().point_at(places, visible + self._size, first_row)


class _TailLayer(RaggedLayer):
    def __init__(self, window: Window, target: RaggedLayer) -> None:
        super().__init__(window)
        self._target = target

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)  # [B, kv, size, d]
        window, target = self._window, self._target
        visible = window.visible - window.columns
        if visible == 0:
            return keys, values
        heads = target.read(window.first_row, len(keys), visible)  # [B, kv, visible, d] each
        return torch.cat([heads[0], keys], dim=2), torch.cat([heads[1], values], dim=2)
