"""Memory of rows: bytes that they need, how many rows fit, and which rows leave when memory ends (preemption)."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from ..cuda.kernels import WORK_SPACE
from ..drafter import Drafter
from ..forwards.runner import QUERIES_PER_FORWARD, TOKENS_PER_FORWARD
from ..network.attention import MaskPlan, attends, calls_attention, reads_spans
from ..network.products import bytes_of_copies
from ..parked_rows import ParkedRows
from ..rows import Request, Rows
from ..sampling.accept import Integers
from .base import PAGE_COLUMNS, pages_of
from .cache import autocast_dtype
from .memory import free_memory
from .pages import PagedCache


_LOGITS = 3  # float32 tensors of the size of the logits that verification keeps: logits, processed scores, noise
LEAST_GRAPH_MEMORY = 2**28
"""Bytes that captured forwards may take even if little is free: shared logits of 64 rows x 6 tokens of a vocabulary of
152 k take 111 MiB in 16 bits, and activations of the widest forward as much again."""
_GRAPHS_SHARE = 8  # an eighth of free memory goes to captured forwards first: an eighth fewer rows are little slower
_ACTIVATIONS = 16  # widest activations of a prefilled token over the hidden size: an MLP keeps 3 of about 5 times it


@dataclass(frozen=True)
class RowNeeds:
    """Bytes that generating takes beside weights.

    Attributes:
        column: K/V of one column of a row, in the target's cache and its drafters'.
        row: a row's activations in a verification, its states and, where K/V lies in the pages of a pool, the K/V
            that does not.
        fixed: activations of a prefill, on CUDA what its attention takes beside them, copies of weights for autocast,
            and captured forwards (:meth:`with_graphs`).
        states: part of `row` that a row takes when it enters, and does not free when it leaves.
    """

    column: float
    row: float
    fixed: float
    states: float = 0.0

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        drafters: Sequence[Drafter],
        verified: int,
        prefilled: int,
        columns: int = 0,
        in_pool: bool = False,
        states: int = 0,
    ) -> "RowNeeds":
        """The needs of `model` and its `drafters`, if `verified` tokens of a row are verified at once, and at most
        `prefilled` tokens are read, in rows of `columns` at most. `in_pool`: K/V lies in the pages of a pool.
        `states`: bytes of a row's states of `model` (what a verification holds of its inputs is a tenth)."""
        autocast, config = autocast_dtype(model.device), model.config.get_text_config(decoder=True)
        dtype, copies = (model.dtype, 0) if autocast is None else (autocast, bytes_of_copies(model, autocast))
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
        states += sum(drafter.row_bytes for drafter in drafters)
        logits = _LOGITS * verified * config.vocab_size * torch.float32.itemsize
        fixed = _ACTIVATIONS * tokens * config.hidden_size * dtype.itemsize + copies
        if reads_spans(model):
            fixed += WORK_SPACE
        elif model.device.type == "cuda":
            fixed += mask_bytes(model, dtype, tokens, columns)
        return cls(column, row=logits + (columns * whole if in_pool else 0.0) + states, fixed=fixed, states=states)

    def graph_memory(self, rows: int, columns: int, free: int, most: float) -> float:
        """Bytes for captured forwards, of `free` bytes: `most`, or less if `rows` rows of `columns` would not fit
        beside them."""
        left = free - self.fixed - rows * (columns * self.column + self.row)
        return min(most, max(left, free / _GRAPHS_SHARE, LEAST_GRAPH_MEMORY))

    def with_graphs(self, graphs: float) -> "RowNeeds":
        """The needs if captured forwards may take `graphs` bytes."""
        return replace(self, fixed=self.fixed + graphs)

    def rows_that_fit(self, columns: int, free: int) -> int:
        """Number of rows of `columns` that fit into `free` bytes; at least one, whose cache may raise."""
        return max(int((free - self.fixed) // (columns * self.column + self.row)), 1)

    def pages_that_fit(self, rows: int, free: int) -> int:
        """Number of pages that fit into `free` bytes beside the other needs of `rows` rows; 0 or less: none."""
        return int((free - self.fixed - rows * self.row) // (PAGE_COLUMNS * self.column))


def mask_bytes(model: PreTrainedModel, dtype: torch.dtype, tokens: int, columns: int) -> int:
    """Bytes that masks take in a forward over `tokens` tokens of prompts in rows of `columns` at most: a mask for each
    layer type, and in a layer its copies for the heads of a group, or the scores of all heads."""
    heads, _layers, kv_heads, _size = attention_shape(model)
    types = len(MaskPlan.for_network(model).layer_types)
    in_layer = heads // max(kv_heads, 1) if calls_attention(model) else 4 * heads  # scores, softmax, weights
    queries = min(tokens, QUERIES_PER_FORWARD)
    squares = max(tokens * min(columns, QUERIES_PER_FORWARD), queries * columns)  # many short rows, or a long one
    return squares * (1 + (types + in_layer) * dtype.itemsize)  # 1: what is masked


warned_of: set[torch.device] = set()
"""Devices on which this process has warned of little memory."""


def warn_of_little_memory(device: torch.device, free: int, graphs: float, most: float, rows: int, asked: int) -> None:
    """Warns, once per device and process, that `free` bytes leave captured forwards `graphs` bytes, less than `most`,
    and only `rows` of the `asked` rows are in flight."""
    if device in warned_of:
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
    """Admits rows while memory lasts, and names rows that leave when it ends (preemption).

    Lengths are unknown. So rows are admitted while memory lasts for as many more tokens per row as it has generated, a
    good guess for long-tailed lengths, at least a page. If memory ends earlier, the shortest rows leave, whose K/V is
    cheapest to compute again. They wait until another row has ended. Parked rows leave first.

    Attributes:
        parked: rows whose K/V waits for the next turn of a conversation, or None.
    """

    parked: ParkedRows | None = None

    def __init__(self, rows: Rows, needs: RowNeeds) -> None:
        self._rows, self._needs = rows, needs
        self._slack, self._columns_then = 0.0, 0  # spare bytes at the last query, and columns in flight then
        self._refused_at = rows.capacity + 1  # rows in flight when there was no memory for another one

    @property
    def is_full(self) -> bool:
        """Whether no row has left since memory for another one was lacking."""
        return self._rows.active >= self._refused_at

    def fitting(self, requests: Sequence[Request]) -> int:
        """Number of first `requests` that fit into memory; at least one if no row is in flight."""
        rows = self._rows
        left = self._left(np.minimum(np.maximum(rows.host_generated, PAGE_COLUMNS), rows.remaining))
        count = 0
        for needed in self._needed(requests):
            left = self._spare(left - needed)
            if left < 0:
                self._refused_at = max(rows.active + count, 1)
                break
            count += 1
        return count if count or rows.active else 1

    def leaving(self, columns: int) -> list[int]:
        """Returns the rows that leave, so that all other rows, of `columns` together, have memory for another page.

        It queries the system rarely: when half of the bytes that were spare at the last query are taken.
        """
        rows, needs = self._rows, self._needs
        if (columns - self._columns_then) * needs.column < self._slack / 2:
            return []
        per_row = PAGE_COLUMNS * needs.column + needs.row - needs.states
        slack = self._spare(self._left(np.full_like(rows.host_lengths, PAGE_COLUMNS)))
        leaving: list[int] = []
        for row in rows.host_lengths.argsort(kind="stable")[: rows.active - 1].tolist():  # the longest row stays
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
        """Bytes left when rows have grown by `growth` `[active]` columns."""
        rows, needs = self._rows, self._needs
        free = free_memory(rows.tokens.device) - needs.fixed
        return free - rows.active * (needs.row - needs.states) - int(growth.sum()) * needs.column

    def _spare(self, left: float) -> float:
        """Returns `left`, with the bytes of parked rows that leave if it is negative, the oldest first."""
        while left < 0 and self.parked is not None and (freed := self.parked.drop_oldest()):
            left += freed
        return left

    def _needed(self, requests: Sequence[Request]) -> Iterator[float]:
        """Bytes that every request will need."""
        for request in requests:
            yield _expected(request) * self._needs.column + self._needs.row


class PagedRowMemory(RowMemory):
    """Like :class:`RowMemory`, by pages of `cache`, which are counted exactly, in every round. A round drafts at most
    `most_drafted` tokens of a row."""

    def __init__(self, rows: Rows, cache: PagedCache, most_drafted: int) -> None:
        super().__init__(rows, RowNeeds(0.0, 0.0, 0.0))
        self._pages, self._drafted = cache.pages, most_drafted

    def leaving(self, columns: int) -> list[int]:
        """Returns the rows that leave, so that other rows have pages for the writes of the next round."""
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
        """Pages left when rows have grown by `growth` `[active]` columns."""
        lengths = (self._rows.host_lengths + growth).tolist()
        return self._pages.free - sum(self._growth(row, length) for row, length in enumerate(lengths))

    def _spare(self, left: float) -> float:
        return left  # parked rows are not in the pool

    def _needed(self, requests: Sequence[Request]) -> Iterator[float]:
        known = set(self._rows.texts)
        for request in requests:
            pages = pages_of(_expected(request) + self._drafted)
            if request.generated is None:
                text = request.text
                if text in known:
                    pages -= (len(request.prompt) - 1) // PAGE_COLUMNS  # shared with another row
                known.add(text)
            yield pages

    def _growth(self, row: int, length: int) -> int:
        """Pages that a row of `length` tokens and its drafts still need."""
        return max(pages_of(length + self._drafted) - len(self._pages.of_row[row]), 0)


def _expected(request: Request) -> int:
    """Expected columns of a request: as many more as it has generated, or a page."""
    length = request.length
    return min(length + max(length - len(request.prompt), PAGE_COLUMNS), request.limit)


def kv_bytes(model: PreTrainedModel, dtype: torch.dtype | None = None) -> float:
    """κ, the bytes of K/V per token of `model`, which computes in `dtype`; None: the weights' dtype."""
    _heads, layers, kv_heads, head_dim = attention_shape(model)
    return 2.0 * layers * kv_heads * head_dim * (dtype or model.dtype).itemsize


def attention_shape(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """Heads, layers that attend, K/V heads and the size of a head."""
    config = model.config.get_text_config(decoder=True)
    shape = vars(config)  # architectures leave out different keys
    types = getattr(config, "layer_types", None)
    layers = config.num_hidden_layers if types is None else sum(map(attends, types))
    if not layers:
        return 0, 0, 0, 0
    heads = config.num_attention_heads
    head_dim = shape.get("head_dim") or config.hidden_size // heads
    return heads, layers, shape.get("num_key_value_heads") or heads, head_dim
