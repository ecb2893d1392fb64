"""How many rows there is memory for, and which rows leave when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from .cache import autocast_dtype
from .drafter import Drafter
from .memory import PAGE_COLUMNS, free_memory
from .model_costs import kv_bytes
from .rows import Request, Rows, text_length
from .runner import TOKENS_PER_FORWARD


_LOGITS = 3  # float32 tensors of the size of the logits that verification keeps: logits, processed scores, noise
_ACTIVATIONS = 16  # widest activations of a prefilled token over the hidden size: an MLP keeps 3 of about 5 times it


@dataclass(frozen=True)
class RowNeeds:
    """Bytes that generating takes beside weights.

    Args:
        column: K/V of one column of a row, in the target's cache and its drafters'.
        row: a row's share in the activations of a verification.
        fixed: activations of a prefill, and captured forwards.
    """

    column: float
    row: float
    fixed: float

    @classmethod
    def of(
        cls, model: PreTrainedModel, drafters: Sequence[Drafter], verified: int, prefilled: int, graphs: float
    ) -> "RowNeeds":
        """Those of `model` and its `drafters`, where a row's `verified` tokens are verified at once, at most
        `prefilled` are read, and captured forwards take `graphs` bytes."""
        dtype, config = autocast_dtype(model.device) or model.dtype, model.config.get_text_config(decoder=True)
        tokens = min(prefilled, TOKENS_PER_FORWARD)
        return cls(
            column=kv_bytes(model, dtype) + sum(drafter.column_bytes for drafter in drafters),
            row=_LOGITS * verified * config.vocab_size * torch.float32.itemsize,
            fixed=_ACTIVATIONS * tokens * config.hidden_size * dtype.itemsize + graphs,
        )

    def rows_that_fit(self, columns: int, free: int) -> int:
        """Rows of `columns` for which `free` bytes are enough; at least one, whose cache says if it does not fit."""
        return max(int((free - self.fixed) // (columns * self.column + self.row)), 1)


class KVRoom:
    """Watches the memory of rows that take it as they grow.

    Nobody knows how long a row becomes. So rows are admitted while memory lasts until each has as many more tokens as
    it has generated, which is what long-tailed lengths make most likely, or a page; and where memory ends before, rows
    leave: the shortest, whose K/V is computed again soonest. They wait until another row has ended.
    """

    def __init__(self, rows: Rows, needs: RowNeeds) -> None:
        self._rows, self._needs = rows, needs
        self._slack, self._columns_then = 0.0, 0  # bytes to spare at the last look, and columns in flight then
        self._refused_at = rows.capacity + 1

    @property
    def is_full(self) -> bool:
        """Whether no row has left since there was no room for another one."""
        return self._rows.active >= self._refused_at

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of `requests`, from the first on, there is memory for; at least one where no row is in flight."""
        rows, needs = self._rows, self._needs
        growth = np.minimum(np.maximum(rows.host_generated, PAGE_COLUMNS), rows.room)  # [active]
        left = self._free() - rows.active * needs.row - int(growth.sum()) * needs.column
        count = 0
        for request in requests:
            length = text_length(request)
            expected = length + max(length - len(request.prompt), PAGE_COLUMNS)
            left -= min(expected, request.limit) * needs.column + needs.row
            if left < 0:
                break
            count += 1
        if count < len(requests):
            self._refused_at = max(rows.active + count, 1)
        return count if count or rows.active else 1

    def leaving(self, columns: int) -> list[int]:
        """Rows that have to leave, so that each other one, of `columns` together, has memory for another page.

        It looks when half of what was to spare at the last look is taken: the system is asked seldom.
        """
        rows, needs = self._rows, self._needs
        if (columns - self._columns_then) * needs.column < self._slack / 2:
            return []
        per_row = PAGE_COLUMNS * needs.column + needs.row
        slack = self._free() - rows.active * per_row
        shortest = rows.host_lengths.argsort(kind="stable").tolist()
        leaving: list[int] = []
        while slack < 0 and len(leaving) < rows.active - 1:
            leaving.append(shortest[len(leaving)])
            columns -= rows.host_lengths[leaving[-1]]
            slack += rows.host_lengths[leaving[-1]] * needs.column + per_row
        if leaving:
            self._refused_at = rows.active - len(leaving)
        self._slack, self._columns_then = slack, columns
        return sorted(leaving)

    def _free(self) -> float:
        return free_memory(self._rows.tokens.device) - self._needs.fixed
