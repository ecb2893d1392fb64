"""Memory of rows: bytes that they need, the plan of a call, and which rows leave when memory ends (preemption)."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as numbers
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ....native.cpu_products import first_time
from ...session import Session
from ..cuda.graph_capture import SMALLEST_COLUMNS
from ..cuda.kernels import WORK_SPACE
from ..drafter import Drafter
from ..forwards.runner import QUERIES_PER_FORWARD, TOKENS_PER_FORWARD
from ..forwards.runner_choice import captures, free_for_cache, takes_pool
from ..network.attention import MaskPlan, attends, calls_attention, reads_spans
from ..network.products import bytes_of_copies
from ..parked_rows import ParkedRows
from ..rows import Integers, Request, Rows
from .base import PAGE_COLUMNS, Capacity, KVCache, pages_of
from .cache import autocast_dtype
from .memory import check_memory, free_memory, takes_memory_late
from .pages import PagedCache


if TYPE_CHECKING:
    from ...call import Call


_LOGITS = 3  # float32 tensors of the size of the logits that verification keeps: logits, processed scores, noise
LEAST_GRAPH_MEMORY = 2**28
"""Bytes that captured forwards may take even if little is free: shared logits of 64 rows x 6 tokens of a vocabulary of
152 k take 111 MiB in 16 bits, and activations of the widest forward as much again."""
_GRAPHS_SHARE = 8  # an eighth of free memory goes to captured forwards first: an eighth fewer rows are little slower
_LIMIT_OVER_LENGTH = 4
"""Share of the length limit per row for which a pool has pages: lengths have a long tail, and with a mean of an eighth
of the limit rows took at most 0.16 of rows x limit (`kv_memory`, benchmarks/RESULTS.md)."""
_ACTIVATIONS = 16  # widest activations of a prefilled token over the hidden size: an MLP keeps 3 of about 5 times it


@dataclass(frozen=True)
class RowNeeds:
    """Bytes that generating takes beside weights.

    Attributes:
        column: K/V of one column of a row, in the target's cache and its drafters'.
        row: a row's activations in a verification, its states and, where K/V lies in the pages of a pool, the K/V
            that does not.
        fixed: activations of a prefill, on CUDA what its attention takes beside them, copies of weights for autocast,
            and captured forwards.
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
        target: float | None = None,
    ) -> "RowNeeds":
        """The needs of `model` and its `drafters`, if `verified` tokens of a row are verified at once, and at most
        `prefilled` tokens are read, in rows of `columns` at most. `in_pool`: K/V lies in the pages of a pool.
        `states`: bytes of a row's states of `model` (what a verification holds of its inputs is a tenth). `target`:
        result of :func:`~.kv_bytes`, if it is known."""
        autocast, config = autocast_dtype(model.device), model.config.get_text_config(decoder=True)
        dtype, copies = (model.dtype, 0) if autocast is None else (autocast, bytes_of_copies(model, autocast))
        tokens = min(prefilled, TOKENS_PER_FORWARD)
        column, whole = float(kv_bytes(model, dtype) if target is None else target), 0.0
        if not reads_spans(model):  # pages are gathered, for one layer at a time
            whole = column / config.num_hidden_layers
        for drafter in drafters:
            if in_pool and not drafter.uses_pool:
                whole += drafter.column_bytes
            else:
                column += drafter.column_bytes
            states += drafter.row_bytes
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


def plan_memory(session: Session, call: "Call", drafters: Sequence[Drafter], drafted: int) -> Capacity:
    """Plans the memory of `call` with its `drafters`, which draft at most `drafted` tokens of a row. Warns, once per
    device, if captured forwards have less memory than the config allows them.

    Raises:
        ValueError: the least number of rows does not fit, or a drafter does not reach so far.
    """
    config, device, rows, columns = call.config, call.model.device, call.capacity, call.longest + drafted
    for drafter in drafters:
        drafter.check_length(columns)
    in_pool, late = takes_pool(config, device, call.family), takes_memory_late(device)
    # One row is alone in memory, so nothing is divided.
    free = free_for_cache(session, device) if in_pool or rows > 1 else 0
    fact, dtype = call.snapshot.find, autocast_dtype(device) or call.model.dtype
    states = fact("states", partial(call.family.row_bytes, call.model))
    column = fact(f"K/V in {dtype}", partial(kv_bytes, call.model, dtype))
    needs = RowNeeds.of(call.model, drafters, drafted + 1, rows * call.longest, columns, in_pool, states, column)
    expected = columns if not states else -(-columns // SMALLEST_COLUMNS) * SMALLEST_COLUMNS
    if in_pool and not call.in_step:
        longest_prompt = call.longest - call.new_tokens
        expected = min(max(columns // _LIMIT_OVER_LENGTH, longest_prompt + PAGE_COLUMNS), columns)
    graphs, most = 0.0, config.max_graph_memory * 2**30 if captures(config, device) else 0.0
    if most:  # little memory means fewer captured forwards before fewer rows
        graphs = needs.graph_memory(rows, expected, free, most)
        needs = replace(needs, fixed=needs.fixed + graphs)
    if call.in_step:  # all rows stay to the end
        check_memory(f"K/V of {rows} rows x {columns} columns", int(rows * columns * needs.column), device)
    elif config.max_batch_size is None and (in_pool or not late):
        rows = min(rows, needs.rows_that_fit(expected, free))
    if needs.states:
        at_once = 1 if late and not call.in_step else rows
        check_memory(f"the states of {at_once} of {rows} rows", int(at_once * needs.states), device)
    if graphs < most and first_time(f"little memory on {device}"):
        few = f", and {rows} of {call.capacity} rows are in flight" if rows < call.capacity else ""
        warnings.warn(
            f"{free / 2**30:.2f} GiB are free on {device}, which is little for {call.capacity} rows: captured "
            f"forwards may take {graphs / 2**30:.2f} GiB instead of max_graph_memory={most / 2**30:g}{few}. Tokens "
            "are the same, but may come slower. Lower max_graph_memory, max_batch_size or max_new_tokens, or free "
            "memory.",
            stacklevel=2,
        )
    pages = needs.pages_that_fit(rows, free) if in_pool and not call.in_step else None
    return Capacity(rows, columns, pages, graphs, needs)


def watch_memory(call: "Call", capacity: Capacity, rows: Rows, cache: KVCache, copied: int) -> "RowMemory | None":
    """Watches the memory of `rows` and their `cache`; None: they need no watching. `copied`: bytes of copied weights,
    which exist already."""
    if call.in_step:
        return None
    if isinstance(cache, PagedCache):
        return PagedRowMemory(rows, cache, capacity.columns - call.longest)
    if takes_memory_late(call.model.device) and capacity.rows > 1:
        return RowMemory(rows, replace(capacity.needs, fixed=capacity.needs.fixed - copied))
    return None


class RowMemory:
    """Admits rows while memory lasts, and names rows that leave when it ends (preemption).

    Lengths are unknown. So admission assumes that every row doubles its generated text, a good guess for long-tailed
    lengths, or grows by a page if that is more. If memory ends earlier, the shortest rows leave, whose K/V is
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


@contextmanager
def preemption(every: int) -> Iterator[None]:
    """In each `every`-th round the first of several rows leaves, as where memory ends: for trials of exactness."""
    rounds = numbers(1)
    as_memory_ends: dict[type[RowMemory], Any] = {kind: kind.leaving for kind in (RowMemory, PagedRowMemory)}

    def leaving(self: RowMemory, columns: int) -> list[int]:
        due = next(rounds) % every == 0 and self._rows.active > 1
        left: list[int] = as_memory_ends[type(self)](self, columns)
        return left or [0][: int(due)]

    try:
        for kind in as_memory_ends:
            kind.leaving = leaving  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in as_memory_ends.items():
            kind.leaving = original  # type: ignore[method-assign]
