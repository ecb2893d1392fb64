"""The ragged K/V cache: rows have separate columns, and are never shifted or padded."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from .base import PAGE_COLUMNS, KVCache, Window, copy_rows_of, pages_of
from .memory import LateZeros, check_memory, takes_memory_late


class RaggedCache(KVCache):
    """Preallocated K/V of `[rows, kv_heads, columns, head_dim]` per layer.

    A forward over q tokens writes the K/V of a row at the row's positions and attends under a mask `column <=
    position` (:class:`~.MaskPlan`):

        row 0   p p p p p o o o . . .      columns beyond a row's length are masked; what a rejected draft
        row 1   p p o o o o o o o o .      left there is overwritten by the next forward
        row 2   p p p o . . . . . . .

    Buffers are made at the first write, in the dtypes and head counts of that write, with `columns` for all tokens
    that a row can hold, drafts included. Memory is taken as columns are written, and freed as rows leave
    (:class:`~.LateZeros`), or all at once if the device cannot do that.
    """

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        window = Window(layers, rows, columns)
        super().__init__(window, [RaggedLayer(window) for _ in range(layers)], rows, columns)

    @classmethod
    def for_network(cls, network: PreTrainedModel, rows: int, columns: int) -> "RaggedCache":
        """A cache with a layer for each of the network's decoder layers."""
        return cls(network.config.get_text_config(decoder=True).num_hidden_layers, rows, columns)

    def like(self, network: PreTrainedModel) -> KVCache:
        return RaggedCache.for_network(network, self.rows, self.columns)

    def beside(self, layers: int, more: int) -> KVCache:
        return RaggedCache(layers, self.rows, self.columns + more)

    def reserve(self, lengths: Sequence[int], first_row: int = 0) -> None:
        """Nothing: memory is taken by writing."""

    def give_back(self, first: int, end: int, kept: int = 0) -> None:
        for layer in self._allocated:
            for buffer in layer.buffers:
                buffer.give_back(first, end, kept)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        in_pages = [pages_of(length) * PAGE_COLUMNS for length in lengths]
        by_kind: dict[Any, int] = {}  # most layers are alike
        total = 0
        for layer in self._allocated:
            for buffer in layer.buffers:
                if buffer.kind not in by_kind:
                    by_kind[buffer.kind] = buffer.bytes_of(in_pages)
                total += by_kind[buffer.kind]
        return total

    @property
    def held_bytes(self) -> int:
        return self.bytes_of([])

    def point_at_texts(self, positions: Tensor, rows: Tensor, columns: int, first_row: int) -> None:
        """Makes the next forward, of one row with the texts of several, write row `first_row + rows[0, i]` at column
        `positions[0, i]` (`[1, q]` int64 each), and read columns `0..columns`."""
        self.point_at(positions, columns, first_row)
        self._window.to_rows, self._window.together = rows + first_row, int(rows.max()) + 1
        self._used = max(self._used, first_row + self._window.together)

    def copy_rows(self, source: list[int], destination: list[int], columns: list[int], differing: int = 0) -> None:
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

    def move_rows(self, source: list[int], destination: list[int], columns: list[int], active: int) -> None:
        for row in destination:
            self.give_back(row, row + 1)
        self.copy_rows(source, destination, columns)
        self.give_back(active, self._used)
        self._used = active

    def _places(self, columns: Tensor, first_row: int, reads: bool = False) -> tuple[Tensor, Tensor]:
        row = torch.arange(first_row, first_row + len(columns), device=columns.device)  # [B]
        return row[:, None].expand_as(columns), columns


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
        return self.read(self._window.first_row, self._window.together or rows, self._window.visible)

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
