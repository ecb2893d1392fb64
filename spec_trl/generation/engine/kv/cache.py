"""The ragged K/V cache: rows have separate columns, and are never shifted or padded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from .memory import LateZeros, check_memory, sent, takes_memory_late


PAGE_COLUMNS = 64
"""Columns of a page: a row's columns are counted, copied and shared by pages. A power of two, like the blocks of
columns that a kernel reads, so that no block crosses pages."""

RowStates: TypeAlias = dict[Any, tuple[Tensor, ...]]
"""Keys and values `[kv_heads, columns, head_dim]` of some columns of a row, by layer; and the row's states
(:class:`~.States`), by layer and index."""


def pages_of(columns: int) -> int:
    """Number of pages for `columns`."""
    return -(-columns // PAGE_COLUMNS)


def copy_rows_of(buffers: Sequence[Tensor], source: list[int], destination: list[int]) -> None:
    """Copies rows `source` of each of `buffers` to its rows `destination`; the host does not wait for the device."""
    if buffers and source:
        at, to = sent(torch.tensor([source, destination]), buffers[0].device)  # [n] each
        for buffer in buffers:
            buffer[to] = buffer[at]


@dataclass
class Window:
    """The size of a cache, and the columns that the current forward reads and writes. Layers reference the window, not
    the cache: a cycle would hold the memory until garbage collection."""

    layers: int
    rows: int  # rows of the buffers
    columns: int  # columns of the buffers
    first_row: int = 0
    to_rows: Tensor | None = None  # [B, q] int64, rows of the buffers that are written
    to_columns: Tensor | None = None  # [B, q] int64, columns of these rows
    visible: int = 0  # columns that are read
    is_allocated: bool = False


class RaggedCache(Cache):
    """Preallocated K/V of `[rows, kv_heads, columns, head_dim]` per layer; row b's token at position t is column t.

    A forward over q tokens writes the K/V of a row at the row's positions and attends under a mask `column <=
    position` (:class:`~.MaskPlan`):

        row 0   p p p p p o o o . . .      columns beyond a row's length are masked; what a rejected draft
        row 1   p p o o o o o o o o .      left there is overwritten by the next forward
        row 2   p p p o . . . . . . .

    Buffers are made at the first write, in the dtypes and head counts of that write, with `columns` for all tokens
    that a row can hold, drafts included. Memory is taken as columns are written, and freed as rows leave
    (:class:`~.LateZeros`), or all at once if the device cannot do that.
    """

    key_positions: Tensor | None = None
    """`[B, columns]` int64, positions of the keys that the next forward reads; None: their columns."""
    offsets: Tensor | None = None
    """`[rows]` int64, to add to the columns of text for its positions, after images (`image_prompts.py`); None: 0."""
    has_states = False
    """Whether layers keep states beside K/V (:class:`~.States`)."""
    held: dict[Any, Any] = {}
    """Inputs that the last verification stored, by layer, for replay into the recurrent states."""
    is_repeatable = True
    """Whether a decode forward may run twice on one input (warm-up, capture); False if it changes states in place."""
    state_bytes = 0
    """Bytes of the states of all rows."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self._window = Window(layers, rows, columns)
        super().__init__(layers=[RaggedLayer(self._window) for _ in range(layers)])
        self.rows = rows
        self.columns = columns
        self._used = 0  # rows that may hold K/V

    @classmethod
    def for_network(cls, network: PreTrainedModel, rows: int, columns: int) -> "RaggedCache":
        """A cache with a layer for each of the network's decoder layers."""
        return cls(network.config.get_text_config(decoder=True).num_hidden_layers, rows, columns)

    def for_drafts(self) -> "RaggedCache":
        """The cache in which the policy's copy drafts: a verification overwrites the K/V of its drafts."""
        return self

    def begin_drafts(self, rows: int) -> None:
        """Makes the drafts of `rows` rows begin at the committed states."""

    def commit(self, lengths: Sequence[int]) -> None:
        """Commits the first `lengths[b]` tokens that the last forward fed for row b to the states. K/V needs
        nothing."""

    def forget(self, rows: Sequence[int]) -> None:
        """Resets the states of `rows` for new texts. K/V needs nothing."""

    def feeds(self, prompt: Sequence[int] | None = None, is_step: bool = False, counts: Tensor | None = None) -> None:
        """Announces the next forward's tokens: `prompt[b]` tokens of row b's prompt, then padding; or one text token
        per row (`is_step`), or where `counts` (`[B]` int64, 0 or 1) says so; or tokens of which :meth:`commit` commits
        some. K/V needs nothing."""

    def point_at(self, positions: Tensor, columns: int, first_row: int) -> None:
        """Makes the next forward write row `first_row + b` at columns `positions[b]` (`[B, q]` int64), and read
        columns `0..columns`."""
        window = self._window
        window.first_row, window.visible = first_row, columns
        window.to_rows, window.to_columns = self._places(positions, first_row)
        self._used = max(self._used, first_row + positions.shape[0])

    def reserve(self, lengths: Sequence[int], first_row: int = 0) -> None:
        """Takes memory for forwards that write the first `lengths[i]` columns of rows `first_row + i`. Here: none."""

    def like(self, network: PreTrainedModel) -> "RaggedCache":
        """Makes a cache for another `network`, of the same size and kind."""
        return type(self).for_network(network, self.rows, self.columns)

    def beside(self, layers: int, more: int) -> "RaggedCache":
        """Makes a cache of the same kind and number of rows, with `layers` layers and `more` columns per row."""
        return RaggedCache(layers, self.rows, self.columns + more)

    def keys_at(self, index: int, columns: Tensor, first_row: int = 0) -> Tensor:
        """Keys `[B, n, kv_heads, d]` of a layer in `columns` (`[B, n]` int64) of the rows from `first_row` on."""
        rows, columns = self._places(columns, first_row, reads=True)
        keys: Tensor = self.layers[index].keys[rows, :, columns]
        return keys

    def wipe(self) -> None:
        """Forgets all rows, and sets all K/V to zeros: a failed drafter may have left NaN."""
        self.clear()
        for layer in self._allocated:
            for buffer in layer.buffers:
                buffer.clear()

    def table_to_read(self, rows: int) -> Tensor | None:
        """Makes the next forward, of `rows` rows, read pages by a table. Returns the table `[rows, pages]` int32,
        pages in the order of columns. None: columns are contiguous, and there is no table."""
        return None

    def layer_at(self, index: int) -> Any:
        """The K/V of the decoder's layer `index`."""
        return self.layers[index]

    @property
    def first_row(self) -> int:
        """First row of the last forward."""
        return self._window.first_row

    def copy_rows(self, source: list[int], destination: list[int], columns: list[int], differing: int = 0) -> None:
        """Copies the first `columns[i]` columns of row `source[i]`, in whole pages, to row `destination[i]`; sources
        and destinations are disjoint. Rows will write the last `differing` of these columns again."""
        if self.offsets is not None:
            copy_rows_of([self.offsets], source, destination)
        by_pages: dict[int, tuple[list[int], list[int]]] = {}  # rows of similar length are copied together
        for row, to, count in zip(source, destination, columns, strict=True):
            sources, destinations = by_pages.setdefault(pages_of(count), ([], []))
            sources.append(row)
            destinations.append(to)
        for pages, (sources, destinations) in by_pages.items():
            count = pages * PAGE_COLUMNS
            buffers = [buffer for layer in self._allocated for buffer in (layer.keys, layer.values)]
            copy_rows_of([buffer[:, :, :count] for buffer in buffers], sources, destinations)
        self._used = max(self._used, max(destination, default=-1) + 1)

    def with_offsets(self, device: torch.device) -> "RaggedCache":
        """Gives all rows an offset of 0; returns the cache."""
        self.offsets = torch.zeros(self.rows, dtype=torch.int64, device=device)
        return self

    def move_rows(self, source: list[int], destination: list[int], columns: list[int], active: int) -> None:
        """Copies rows into gaps by :meth:`copy_rows`, so that `active` rows come first. Frees the memory of other rows
        and of the overwritten ones."""
        for row in destination:
            self.give_back(row, row + 1)
        self.copy_rows(source, destination, columns)
        self.give_back(active, self._used)
        self._used = active

    def clear(self) -> None:
        """Forgets all rows: a generation begins."""
        self.give_back(0, self._used)
        self._used = 0

    def give_back(self, first: int, end: int, kept: int = 0) -> None:
        """Frees the memory of rows `first..end`, except their first `kept` columns."""
        for layer in self._allocated:
            for buffer in layer.buffers:
                buffer.give_back(first, end, kept)

    def trim(self, first: int, lengths: Sequence[int]) -> None:
        """Frees columns that padding has written: the rows from `first` on have `lengths` columns."""
        for row, length in enumerate(lengths, first):
            if pages_of(length) * PAGE_COLUMNS < max(lengths):
                self.give_back(row, row + 1, length)

    def move_columns(self, source: Tensor, destination: Tensor) -> None:
        """Copies columns `source[b]` of row b to columns `destination[b]` (`[B, n]` int64 each); they may overlap,
        without duplicates."""
        (rows, columns), (to_rows, to_columns) = (self._places(each, 0) for each in (source, destination))
        for layer in self._allocated:  # all reads are gathered before the first write
            layer.keys[to_rows, :, to_columns] = layer.keys[rows, :, columns]  # [B, n, kv, d]
            layer.values[to_rows, :, to_columns] = layer.values[rows, :, columns]

    def export_row(self, row: int, start: int, stop: int) -> RowStates:
        """Copies a row's columns `start..stop`; empty if there are none."""
        states: RowStates = {}
        for index, layer in enumerate(self.layers):
            if layer.is_initialized and stop > start:
                keys, values = layer.read(row, 1, stop)  # [1, kv, stop, d] each
                states[index] = keys[0, :, start:].clone(), values[0, :, start:].clone()
        return states

    def import_row(self, row: int, start: int, states: RowStates) -> None:
        """Writes the result of :meth:`export_row` to a row's columns from `start` on."""
        for index, (keys, values) in states.items():
            stop = start + keys.shape[1]
            self.reserve([stop], row)
            self.point_at(torch.arange(start, stop, device=keys.device)[None], 0, row)
            self.layers[index].update(keys[None], values[None])

    @property
    def held_bytes(self) -> int:
        """Bytes of the cache without rows."""
        return self.bytes_of([])

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of a row."""
        return sum(states[0, :, 0].nbytes for layer in self._allocated for states in (layer.keys, layer.values))

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Bytes of the cache with rows of `lengths` columns; of the whole cache if memory is taken at once."""
        in_pages = [pages_of(length) * PAGE_COLUMNS for length in lengths]
        by_kind: dict[Any, int] = {}  # most layers are alike
        total = 0
        for layer in self._allocated:
            for buffer in layer.buffers:
                if buffer.kind not in by_kind:
                    by_kind[buffer.kind] = buffer.bytes_of(in_pages)
                total += by_kind[buffer.kind]
        return total

    def _places(self, columns: Tensor, first_row: int, reads: bool = False) -> tuple[Tensor, Tensor]:
        """Rows and columns of the buffers, `[B, n]` int64 each, to write or read `columns` `[B, n]` of the rows from
        `first_row` on."""
        row = torch.arange(first_row, first_row + len(columns), device=columns.device)  # [B]
        return row[:, None].expand_as(columns), columns

    @property
    def _allocated(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]


class RaggedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    @torch.inference_mode(False)  # these tensors are also written outside of inference mode
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        window, device = self._window, key_states.device
        (_, heads, _, size), (_, value_heads, _, value_size) = key_states.shape, value_states.shape
        if not window.is_allocated:
            column = heads * size * key_states.element_size() + value_heads * value_size * value_states.element_size()
            rows = 1 if takes_memory_late(device) else window.rows  # one row must fit, others wait for memory
            what = f"the K/V cache (rows x columns x layers: {rows} x {window.columns} x {window.layers})"
            check_memory(what, rows * window.columns * column * window.layers, device)
        # Zeros, not empty: masked columns are multiplied by 0, and 0 * NaN is NaN.
        self.buffers = (
            LateZeros((window.rows, heads, window.columns, size), key_states.dtype, device),
            LateZeros((window.rows, value_heads, window.columns, value_size), value_states.dtype, device),
        )
        self.keys, self.values = self.buffers[0].tensor, self.buffers[1].tensor
        self.is_initialized = window.is_allocated = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        # Under autocast RoPE leaves K in float32 and attention casts it down. Stored in the cast dtype, the cache is
        # not converted in every step.
        low_precision = autocast_dtype(key_states.device)
        if low_precision is not None and key_states.dtype == torch.float32:
            key_states, value_states = key_states.to(low_precision), value_states.to(low_precision)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._window
        self.keys[window.to_rows, :, window.to_columns] = key_states.transpose(1, 2)  # [B, q, kv, d]
        self.values[window.to_rows, :, window.to_columns] = value_states.transpose(1, 2)
        return self._visible(len(key_states))

    def read(self, first_row: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, columns, d]` of the rows from `first_row` on."""
        end = first_row + rows
        return self.keys[first_row:end, :, :columns], self.values[first_row:end, :, :columns]

    @property
    def places(self) -> tuple[Tensor, Tensor, int]:
        """Rows and columns that the current forward writes, `[B, q]` int64 each, and its first row."""
        to_rows, to_columns = self._window.to_rows, self._window.to_columns
        assert to_rows is not None and to_columns is not None
        return to_rows, to_columns, self._window.first_row

    def _visible(self, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the current forward, over `rows` rows, reads."""
        return self.read(self._window.first_row, rows, self._window.visible)

    def rotate_and_update(
        self,
        write: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: Sequence[Any],
        *how: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like :meth:`update`, by the kernel `write`, for `[B, q, heads, d]` as projections return them. Queries and
        keys go through `norms`, two or none, and are rotated, as the kernel's arguments `how` say. Returns queries
        `[B, heads, q, d]` and the result of `update`."""
        if not self.is_initialized:
            self.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
        window = self._window
        weights, eps = [norm.weight for norm in norms] or [None, None], norms[0].epsilon if norms else 0.0
        cache = self.keys, self.values, window.to_rows, window.to_columns
        query = write(query, key, value, cos, sin, *cache, *weights, eps, *how)
        return query, *self._visible(len(query))

    # Models get masks and positions, and use no lengths; layers that would are refused (`asks_for_length`).
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.visible, 0

    def get_max_length(self) -> int:
        return self._window.columns

    get_max_cache_shape = get_max_length  # its name before transformers 5.23


class ReplayCache(Cache):
    """K/V of a ragged cache, `[B, kv_heads, columns, d]` by layer, for writes with gradient: every write makes new
    tensors, and every forward reads all columns."""

    def __init__(self, keys_values: list[tuple[Tensor, Tensor]], columns: int) -> None:
        self._window = Window(len(keys_values), 0, columns, visible=columns)
        super().__init__(layers=[_ReplayLayer(self._window, keys, values) for keys, values in keys_values])
        self.columns = columns

    def point_at(self, positions: Tensor) -> None:
        """Makes the next forward write to columns `[B, q]` int64."""
        self._window.to_columns = positions


class _ReplayLayer(RaggedLayer):
    def __init__(self, window: Window, keys: Tensor, values: Tensor) -> None:
        super().__init__(window)
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        positions = self._window.to_columns  # [B, q]
        assert positions is not None
        where = torch.arange(len(positions), device=positions.device)[:, None], slice(None), positions
        self.keys = self.keys.to(key_states.dtype, copy=True)
        self.values = self.values.to(value_states.dtype, copy=True)
        self.keys[where] = key_states.transpose(1, 2)  # [B, q, kv, d]
        self.values[where] = value_states.transpose(1, 2)
        return self.keys, self.values


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Dtype of autocast on `device`; None: autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
