"""Memory of rows: bytes that they need, how many rows fit, and which rows leave when memory ends (preemption)."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from .accept import Integers
from .attention import reads_spans
from .cache import PAGE_COLUMNS, autocast_dtype, pages_of
from .drafter import Drafter
from .linear_layers import bytes_of_copies
from .memory import free_memory
from .model_costs import kv_bytes
from .pages import PagedCache
from .rows import Request, Rows
from .runner import TOKENS_PER_FORWARD


_LOGITS = 3  # float32 tensors of the size of the logits that verification keeps: logits, processed scores, noise
LEAST_GRAPH_MEMORY = 2**28
"""Bytes that captured forwards may take however little is free: logits of 64 rows x 6 tokens of a vocabulary of 152 k
take 111 MiB in 16 bits, which all share, and activations of the widest one as much again."""
_GRAPHS_SHARE = 8  # of what is free, one part is theirs before rows: an eighth fewer rows are little slower
_ACTIVATIONS = 16  # widest activations of a prefilled token over the hidden size: an MLP keeps 3 of about 5 times it


@dataclass(frozen=True)
class RowNeeds:
    """Bytes that generating takes beside weights.

    Attributes:
        column: K/V of one column of a row, in the target's cache and its drafters'.
        row: a row's activations in a verification and, where K/V lies in the pages of a pool, the K/V that does not.
        fixed: activations of a prefill, copies of weights for autocast, and captured forwards (:meth:`with_graphs`).
    """

    column: float
    row: float
    fixed: float

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        drafters: Sequence[Drafter],
        verified: int,
        prefilled: int,
        in_pool: int = 0,
        states: int = 0,
    ) -> "RowNeeds":
        """The needs of `model` and its `drafters`, where `verified` tokens of a row are verified at once and at most
        `prefilled` tokens are read. `in_pool`: columns of a row, where K/V lies in the pages of a pool. `states`:
        bytes of a row's states, of which drafts have as many (what a verification holds of its inputs is a tenth)."""
        dtype, config = autocast_dtype(model.device) or model.dtype, model.config.get_text_config(decoder=True)
        tokens = min(prefilled, TOKENS_PER_FORWARD)
        target = kv_bytes(model, dtype)
        column, whole = target, 0.0
        if not reads_spans(model):  # pages are gathered, for one layer at a time
            whole = target / config.num_hidden_layers
        for drafter in drafters:
            if in_pool and not drafter.uses_pool:
                whole += drafter.column_bytes
            else:
                column += drafter.column_bytes
        logits = _LOGITS * verified * config.vocab_size * torch.float32.itemsize
        return cls(
            column=column,
            row=logits + in_pool * whole + states * (2 if drafters else 1),
            fixed=_ACTIVATIONS * tokens * config.hidden_size * dtype.itemsize + bytes_of_copies(model),
        )

    def graph_memory(self, rows: int, columns: int, free: int, most: float) -> float:
        """Bytes for captured forwards, of `free` bytes: `most`, or less where `rows` of `columns` would not fit beside
        them."""
        left = free - self.fixed - rows * (columns * self.column + self.row)
        return min(most, max(left, free / _GRAPHS_SHARE, LEAST_GRAPH_MEMORY))

    def with_graphs(self, graphs: float) -> "RowNeeds":
        """The needs where captured forwards may take `graphs` bytes."""
        return replace(self, fixed=self.fixed + graphs)

    def rows_that_fit(self, columns: int, free: int) -> int:
        """Rows of `columns` for which `free` bytes are enough; at least one, whose cache says if it does not fit."""
        return max(int((free - self.fixed) // (columns * self.column + self.row)), 1)

    def pages_that_fit(self, rows: int, free: int) -> int:
        """Pages of a pool for which `free` bytes are enough beside what else `rows` rows need; 0 or less: none."""
        return int((free - self.fixed - rows * self.row) // (PAGE_COLUMNS * self.column))


warned_of: set[torch.device] = set()
"""Where little memory was warned of in this process."""


def warn_of_little_memory(device: torch.device, free: int, graphs: float, most: float, rows: int, asked: int) -> None:
    """Warns, once per device and process, where `free` bytes leave captured forwards `graphs` bytes, less than `most`,
    and `rows` of the `asked` rows are in flight."""
    if graphs >= most or device in warned_of:
        return
    warned_of.add(device)
    few = f", and {rows} of {asked} rows are in flight" if rows < asked else ""
    warnings.warn(
        f"{free / 2**30:.2f} GiB are free on {device}, which is little for {asked} rows: captured forwards may take "
        f"{graphs / 2**30:.2f} GiB instead of max_graph_memory={most / 2**30:g}{few}. Tokens are the same, but may "
        "come slower. Lower max_graph_memory, max_batch_size or max_new_tokens, or free memory.",
        stacklevel=2,
    )


class RowMemory:
    """Watches the memory of rows that take it as they grow.

    Nobody knows how long a row becomes. So rows are admitted while memory lasts until each has as many more tokens as
    it has generated, which is what long-tailed lengths make most likely, or a page. Where memory ends before, the
    shortest rows leave, whose K/V is computed again soonest. They wait until another row has ended.
    """

    def __init__(self, rows: Rows, needs: RowNeeds) -> None:
        self._rows, self._needs = rows, needs
        self._slack, self._columns_then = 0.0, 0  # bytes to spare at the last look, and columns in flight then
        self._refused_at = rows.capacity + 1  # rows in flight when there was no memory for another one

    @property
    def is_full(self) -> bool:
        """Whether no row has left since memory for another one was lacking."""
        return self._rows.active >= self._refused_at

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of `requests`, from the first on, there is memory for; at least one where no row is in flight."""
        rows = self._rows
        left = self._left(np.minimum(np.maximum(rows.host_generated, PAGE_COLUMNS), rows.remaining))
        count = 0
        for needed in self._needed(requests):
            left -= needed
            if left < 0:
                self._refused_at = max(rows.active + count, 1)
                break
            count += 1
        return count if count or rows.active else 1

    def leaving(self, columns: int) -> list[int]:
        """Rows that have to leave, so that every other row, of `columns` together, has memory for another page.

        It asks the system seldom: when half of what was to spare at the last look is taken.
        """
        rows, needs = self._rows, self._needs
        if (columns - self._columns_then) * needs.column < self._slack / 2:
            return []
        per_row = PAGE_COLUMNS * needs.column + needs.row
        slack = self._left(np.full_like(rows.host_lengths, PAGE_COLUMNS))
        leaving: list[int] = []
        for row in rows.host_lengths.argsort(kind="stable")[: rows.active - 1].tolist():  # the last one stays
            if slack >= 0:
                break
            leaving.append(row)
            columns -= rows.host_lengths[row]
            slack += rows.host_lengths[row] * needs.column + per_row
        if leaving:
            self._refused_at = rows.active - len(leaving)
        self._slack, self._columns_then = slack, columns
        return sorted(leaving)

    def _left(self, growth: Integers) -> float:
        """Bytes that are left when rows have become longer by `growth` `[active]` columns."""
        rows, needs = self._rows, self._needs
        free = free_memory(rows.tokens.device) - needs.fixed
        return free - rows.active * needs.row - int(growth.sum()) * needs.column

    def _needed(self, requests: Sequence[Request]) -> Iterator[float]:
        """Bytes that `requests` will need, one after the other."""
        for request in requests:
            yield _expected(request) * self._needs.column + self._needs.row


class PagedRowMemory(RowMemory):
    """Watches the pages of `cache`, which can be counted exactly, and so in every round. A round drafts at most
    `most_drafted` tokens of a row."""

    def __init__(self, rows: Rows, cache: PagedCache, most_drafted: int) -> None:
        super().__init__(rows, RowNeeds(0.0, 0.0, 0.0))
        self._pages, self._drafted = cache.pages, most_drafted

    def leaving(self, columns: int) -> list[int]:
        """Rows that have to leave, so that the others have pages for what the next round writes."""
        rows, lacking = self._rows, -self._left(np.zeros_like(self._rows.host_lengths))
        leaving: list[int] = []
        for row in rows.host_lengths.argsort(kind="stable")[: rows.active - 1].tolist():
            if lacking <= self._pages.only_of(leaving):
                break
            leaving.append(row)
            lacking -= self._growth(row, rows.host_lengths[row])
        if leaving:
            self._refused_at = rows.active - len(leaving)
        return sorted(leaving)

    def _left(self, growth: Integers) -> float:
        """Pages that are free when rows have become longer by `growth` `[active]` columns."""
        lengths = (self._rows.host_lengths + growth).tolist()
        return self._pages.free - sum(self._growth(row, length) for row, length in enumerate(lengths))

    def _needed(self, requests: Sequence[Request]) -> Iterator[float]:
        known = set(self._rows.prompts)
        for request in requests:
            pages = pages_of(_expected(request) + self._drafted)
            if request.generated is None:
                prompt = request.prompt.cpu().numpy().tobytes()
                if prompt in known:
                    pages -= (len(request.prompt) - 1) // PAGE_COLUMNS  # shared with another row
                known.add(prompt)
            yield pages

    def _growth(self, row: int, length: int) -> int:
        """Pages that a row of `length` tokens, and drafts after them, lacks."""
        return max(pages_of(length + self._drafted) - len(self._pages.of_row[row]), 0)


def _expected(request: Request) -> int:
    """Columns that a request will probably take: as many more as it has generated, or a page."""
    length = request.length
    return min(length + max(length - len(request.prompt), PAGE_COLUMNS), request.limit)
