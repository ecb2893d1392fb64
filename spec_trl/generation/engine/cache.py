"""The ragged K/V cache: every row owns its own columns, nothing is ever shifted or padded."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from .memory import PagedZeros, check_memory, in_pages, takes_pages


RowStates: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""Keys and values `[kv_heads, columns, head_dim]` of some columns of a row, by layer."""


@dataclass
class _Window:
    """The size of a cache, and what the present forward reads and writes. Layers hold this: if they held their cache,
    its memory would stay until the garbage collector finds the cycle."""

    layers: int
    rows: int  # of the buffers, as columns
    columns: int
    first_row: int = 0
    to_rows: Tensor | None = None  # [B, q] int64, rows of the buffers that are written
    to_columns: Tensor | None = None  # [B, q] int64, columns of these rows
    visible: int = 0  # columns that are read
    is_allocated: bool = False


class RaggedCache(Cache):
    """Preallocated K/V of `[rows, kv_heads, columns, head_dim]` per layer; row b's token at position t is column t.

    A forward over q tokens writes each row's K/V at that row's own positions and attends under a mask
    `column <= position` (:class:`~spec_trl.generation.engine.attention.MaskPlan`):

        row 0   p p p p p o o o . . .      columns beyond a row's length are masked; what a rejected draft
        row 1   p p o o o o o o o o .      left there is overwritten by the next forward
        row 2   p p p o . . . . . . .

    Buffers are made at the first write, in the dtypes and head counts that the layer really has, with `columns` for
    all tokens that a row can hold, drafts included. Memory is taken as columns are written, and given back as rows
    leave (:class:`~spec_trl.generation.engine.memory.PagedZeros`); where the device cannot, all at once.
    """

    key_positions: Tensor | None = None
    """`[B, columns]` int64, positions of the keys that the next forward reads, where these are not their columns."""

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        self._window = _Window(layers, rows, columns)
        super().__init__(layers=[_RaggedLayer(self._window) for _ in range(layers)])
        self.rows = rows
        self.columns = columns
        self._used = 0  # rows that may hold something

    @classmethod
    def for_network(cls, network: PreTrainedModel, rows: int, columns: int) -> "RaggedCache":
        """A cache with a layer for each of the network's decoder layers."""
        from .states import States, keeps_states

        config = network.config.get_text_config(decoder=True)
        kind = States if keeps_states(network) else RaggedCache
        return kind(config.num_hidden_layers, rows, columns)

    def for_drafts(self) -> "RaggedCache":
        """The cache with which the policy's copy drafts: what it writes for drafts, a verification overwrites."""
        return self

    def begin_drafts(self, rows: int) -> None:
        """Has the drafts of `rows` rows begin at the committed states."""

    def commit(self, lengths: Sequence[int]) -> None:
        """Takes the first `lengths[b]` tokens that the last forward fed for row b into states. K/V need nothing."""

    def forget(self, first: int, end: int) -> None:
        """Rows `first..end` begin with new texts. K/V need nothing."""

    def feeds(self, tokens: int, text: Sequence[int] | None) -> None:
        """Says before a forward over `tokens` tokens of each row how many of them are text; None: not known yet."""

    def point_at(self, positions: Tensor, columns: int, first_row: int) -> None:
        """Says where the next forward writes: row `first_row + b` at columns `positions[b]` (`[B, q]` int64), and that
        it reads columns `0..columns`."""
        window = self._window
        window.first_row, window.visible = first_row, columns
        window.to_rows, window.to_columns = self._places(positions, first_row)
        self._used = max(self._used, first_row + positions.shape[0])

    def reserve(self, lengths: Sequence[int], first_row: int = 0) -> None:
        """Makes ready for forwards that write the first `lengths[i]` columns of each row `first_row + i`: nothing,
        where memory is taken as it is written."""

    def like(self, network: PreTrainedModel) -> "RaggedCache":
        """A cache for another `network`, of the same size and kind."""
        return type(self).for_network(network, self.rows, self.columns)

    def beside(self, layers: int, more: int) -> "RaggedCache":
        """A cache of the same kind for as many rows, of so many `layers` and with `more` columns for each row."""
        return RaggedCache(layers, self.rows, self.columns + more)

    def keys_at(self, index: int, columns: Tensor, first_row: int = 0) -> Tensor:
        """Keys `[B, n, kv_heads, d]` of a layer in `columns` (`[B, n]` int64) of the rows from `first_row` on."""
        rows, columns = self._places(columns, first_row, reads=True)
        keys: Tensor = self.layers[index].keys[rows, :, columns]
        return keys

    def wipe(self) -> None:
        """Sets all K/V to zeros, and forgets all rows: a drafter that broke may have left NaN."""
        self.clear()
        for layer in self._allocated:
            for buffer in layer.buffers:
                buffer.clear()

    def table_to_read(self, rows: int) -> Tensor | None:
        """Has the next forward, of `rows` rows, read pages where they lie; returns `[rows, pages]` int32, which page
        holds which columns. None: columns lie next to each other, and there is no table."""
        return None

    def layer_at(self, index: int) -> Any:
        """Where the decoder's layer `index` writes."""
        return self.layers[index]

    @property
    def first_row(self) -> int:
        """First row of the last forward."""
        return self._window.first_row

    def copy_rows(self, source: list[int], destination: list[int], columns: list[int], differing: int = 0) -> None:
        """Copies the first `columns[i]` columns of each row `source[i]`, in whole pages, to row `destination[i]`; the
        two do not overlap. In the last `differing` of these columns each row will write its own."""
        by_pages: dict[int, tuple[list[int], list[int]]] = {}  # rows of like length are copied at once
        for row, to, count in zip(source, destination, columns, strict=True):
            sources, destinations = by_pages.setdefault(in_pages(count), ([], []))
            sources.append(row)
            destinations.append(to)
        for count, (sources, destinations) in by_pages.items():
            for layer in self._allocated:
                layer.keys[destinations, :, :count] = layer.keys[sources, :, :count]
                layer.values[destinations, :, :count] = layer.values[sources, :, :count]
        self._used = max([self._used, *(row + 1 for row in destination)])

    def move_rows(self, source: list[int], destination: list[int], columns: list[int], active: int) -> None:
        """Copies rows into gaps, as :meth:`copy_rows` does, so that `active` rows come first; the memory of the
        others, and of what stood in the gaps, is given back."""
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
        """Gives back the memory of rows `first..end`, but for their first `kept` columns, where it is taken page by
        page."""
        for layer in self._allocated:
            for buffer in layer.buffers:
                buffer.give_back(first, end, kept)

    def trim(self, first: int, lengths: Sequence[int]) -> None:
        """Gives back what padding has written: the rows from `first` on, written together, have `lengths` columns."""
        for row, length in enumerate(lengths, first):
            if in_pages(length) < max(lengths):
                self.give_back(row, row + 1, length)

    def move_columns(self, source: Tensor, destination: Tensor) -> None:
        """Copies columns `source[b]` of row b to its columns `destination[b]` (`[B, n]` int64 each), which may overlap
        but name no column twice."""
        (rows, columns), (to_rows, to_columns) = (self._places(each, 0) for each in (source, destination))
        for layer in self._allocated:  # what is read is gathered before anything is written
            layer.keys[to_rows, :, to_columns] = layer.keys[rows, :, columns]  # [B, n, kv, d]
            layer.values[to_rows, :, to_columns] = layer.values[rows, :, columns]

    def export_row(self, row: int, start: int, stop: int) -> RowStates:
        """A copy of a row's columns `start..stop`; nothing where that is none."""
        layers = [(index, layer) for index, layer in enumerate(self.layers) if layer.is_initialized]
        found: RowStates = {}
        for index, layer in layers if stop > start else ():
            keys, values = layer.read(row, 1, stop)  # [1, kv, stop, d] each
            found[index] = keys[0, :, start:].clone(), values[0, :, start:].clone()
        return found

    def import_row(self, row: int, start: int, states: RowStates) -> None:
        """Writes what :meth:`export_row` gave to a row's columns from `start` on."""
        for index, (keys, values) in states.items():
            stop = start + keys.shape[1]
            self.reserve([stop], row)
            self.point_at(torch.arange(start, stop, device=keys.device)[None], 0, row)
            self.layers[index].update(keys[None], values[None])

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes without any rows."""
        return self.bytes_of([])

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of a row."""
        return sum(states[0, :, 0].nbytes for layer in self._allocated for states in (layer.keys, layer.values))

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Bytes that the cache takes with rows of `lengths` columns, where memory is taken page by page; else all."""
        counts = Counter(buffer.kind for layer in self._allocated for buffer in layer.buffers)
        kinds = {buffer.kind: buffer for layer in self._allocated for buffer in layer.buffers}  # alike in most layers
        return sum(count * kinds[kind].bytes_of(lengths) for kind, count in counts.items())

    def _places(self, columns: Tensor, first_row: int, reads: bool = False) -> tuple[Tensor, Tensor]:
        """Rows and columns of the buffers, `[B, n]` int64 each, where `columns` `[B, n]` of the rows from `first_row`
        on are written, or are read."""
        row = torch.arange(first_row, first_row + len(columns), device=columns.device)  # [B]
        return row[:, None].expand_as(columns), columns

    @property
    def _allocated(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]


class _RaggedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self._window = window

    @torch.inference_mode(False)  # what is made here is written to outside of inference mode too
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        window, given = self._window, (key_states, value_states)
        if not window.is_allocated:
            rows = 1 if takes_pages(key_states.device) else window.rows  # one must fit, others wait for memory
            column = sum(states.shape[1] * states.shape[3] * states.element_size() for states in given)
            what = f"the K/V cache (rows x columns x layers: {rows} x {window.columns} x {window.layers})"
            check_memory(what, rows * window.columns * column * window.layers, key_states.device)
        # Zeros, not empty: a masked column still meets a weight of 0, and 0 * NaN is NaN.
        self.buffers = tuple(
            PagedZeros((window.rows, states.shape[1], window.columns, states.shape[3]), states.dtype, states.device)
            for states in given
        )
        self.keys, self.values = (buffer.tensor for buffer in self.buffers)
        self.is_initialized = window.is_allocated = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        # Under autocast RoPE leaves K in float32 and attention casts it down anyway: stored in the cast dtype, the
        # whole cache is not converted again in every step.
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
        own = slice(first_row, first_row + rows)
        return self.keys[own, :, :columns], self.values[own, :, :columns]

    @property
    def places(self) -> tuple[Tensor, Tensor, int]:
        """Rows and columns that the present forward writes, `[B, q]` int64 each, and its first row."""
        to_rows, to_columns = self._window.to_rows, self._window.to_columns
        assert to_rows is not None and to_columns is not None
        return to_rows, to_columns, self._window.first_row

    def _visible(self, rows: int) -> tuple[Tensor, Tensor]:
        """What the present forward, over `rows` rows, reads."""
        return self.read(self._window.first_row, rows, self._window.visible)

    def rotate_and_update(
        self, write: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, norms: Sequence[Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`update` for heads `[B, q, heads, d]` as the projections give them, in the one kernel `write`: queries
        and keys go through `norms`, one for each or none, and are rotated.

        Returns:
            Queries `[B, heads, q, d]`, and what `update` returns.
        """
        if not self.is_initialized:
            self.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
        window = self._window
        weights, eps = [norm.weight for norm in norms] or [None, None], norms[0].variance_epsilon if norms else 0.0
        cache = self.keys, self.values, window.to_rows, window.to_columns
        query = write(query, key, value, cos, sin, *cache, *weights, eps)
        return query, *self._visible(len(query))

    # Models are given masks and positions, and use no lengths; layers that would are refused (`asks_for_length`).
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.visible, 0

    def get_max_length(self) -> int:
        return self._window.columns

    get_max_cache_shape = get_max_length  # its name before transformers 5.23


class TailCache(RaggedCache):
    """K/V of a drafter that runs ahead of the target whose copy it is (SA §4.1). It reads the target's columns of
    committed text, which nobody writes while it drafts, and keeps the K/V of what follows in a tail of its own:

        target's columns        t t t t t x x x .     row of L = 6 committed tokens; x: verification may write them
        tail, size 4                      d d d d     position t is column t % 4
                                          ^ L - 1, which the target has not computed

    Nothing moves when tokens are committed: their positions are read in the target's columns from then on. The target
    never reads the tail, so a drafter that fails, or hangs and goes on later, changes no token.

    Args:
        target: the target's cache; it must not be written in columns below L - 1 while a forward runs.
        committed: `[rows]` int64, L of each row; the caller's, who keeps it up to date.
        size: columns of the tail. A row's positions after them share the last one.
    """

    def __init__(self, target: RaggedCache, committed: Tensor, size: int) -> None:
        super().__init__(len(target.layers), target.rows, size)
        self.layers = [_TailLayer(self._window, layer) for layer in target.layers]
        self.columns = target.columns
        self._committed, self._size = committed, size

    def point_at(self, positions: Tensor, columns: int, first_row: int) -> None:
        heads = self._committed[first_row : first_row + len(positions), None] - 1  # [B, 1]
        visible = columns if heads.any() else 0  # where all texts have one token, the target may have no K/V yet
        column = torch.arange(visible, device=heads.device)  # [visible]
        tail = torch.arange(self._size, device=heads.device)  # [size]
        unseen = torch.iinfo(torch.int64).max  # later than any query
        self.key_positions = torch.cat(
            [torch.where(column < heads, column, unseen), heads + (tail - heads) % self._size], dim=1
        )  # [B, visible + size]
        places = torch.minimum(positions, heads + self._size - 1) % self._size  # [B, q]
        super().point_at(places, visible + self._size, first_row)


class _TailLayer(_RaggedLayer):
    def __init__(self, window: _Window, target: _RaggedLayer) -> None:
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


class ReplayCache(Cache):
    """K/V of a ragged cache, `[B, kv_heads, columns, d]` of each layer, to be written to with gradient: every write
    makes new tensors, and every forward reads all columns."""

    def __init__(self, keys_values: list[tuple[Tensor, Tensor]], columns: int) -> None:
        self._window = _Window(len(keys_values), 0, columns, visible=columns)
        super().__init__(layers=[_ReplayLayer(self._window, keys, values) for keys, values in keys_values])
        self.columns = columns

    def point_at(self, positions: Tensor) -> None:
        """Says where the next forward writes: columns `[B, q]` int64 of each row."""
        self._window.to_columns = positions


class _ReplayLayer(_RaggedLayer):
    def __init__(self, window: _Window, keys: Tensor, values: Tensor) -> None:
        super().__init__(window)
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        positions = self._window.to_columns  # [B, q]
        assert positions is not None
        where = torch.arange(len(positions), device=positions.device)[:, None], slice(None), positions
        keys, values = self.keys.to(key_states.dtype, copy=True), self.values.to(value_states.dtype, copy=True)
        keys[where], values[where] = key_states.transpose(1, 2), value_states.transpose(1, 2)  # [B, q, kv, d]
        self.keys, self.values = keys, values
        return keys, values


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on `device`; None: it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
