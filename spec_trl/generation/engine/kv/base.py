"""The verbs of a K/V cache, before its implementations: rows of columns (`cache.py`), and pages (`pages.py`)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .memory import sent


PAGE_COLUMNS = 64
"""Columns of a page: a row's columns are counted, copied and shared by pages. A power of two, like the blocks of
columns that a kernel reads, so that no block crosses pages."""

RowKV: TypeAlias = dict[Any, tuple[Tensor, ...]]
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
    together: int = 0  # rows that are read, if a row of the forward holds the texts of several
    is_allocated: bool = False


@dataclass(frozen=True)
class Capacity:
    """Memory of a call.

    Attributes:
        rows: most in flight.
        columns: of a row, for tokens and drafts. "none" has the same: attention over another width differs in the last
            bits.
        pages: of a pool; None: there is no pool.
        graphs: bytes that captured forwards may take.
        needs: of the rows, a :class:`~.RowNeeds`; None: not planned.
    """

    rows: int
    columns: int
    pages: int | None = None
    graphs: float | None = None
    needs: Any = None


class KVCache(Cache, ABC):
    """K/V of `rows` rows with up to `columns` columns each; row b's token at position t is column t.

    A forward: :meth:`reserve` memory, :meth:`point_at` columns, run the network, whose attention calls `update` of
    `layers`. Between forwards rows are copied, moved and freed.
    """

    offsets: Tensor | None = None
    """`[rows]` int64, to add to the columns of text for its positions, after media (`media.py`); None: 0."""
    key_positions: Tensor | None = None
    """`[B, columns]` int64, positions of the keys that the next forward reads; None: their columns."""

    def __init__(self, window: Window, layers: list[Any], rows: int, columns: int) -> None:
        super().__init__(layers=layers)
        self._window = window
        self.rows = rows
        self.columns = columns
        self._used = 0  # rows that may hold K/V

    # ---- a forward --------------------------------------------------------------------------------------------------

    @abstractmethod
    def reserve(self, lengths: Sequence[int], first_row: int = 0) -> None:
        """Takes memory for forwards that write the first `lengths[i]` columns of rows `first_row + i`."""

    def point_at(self, positions: Tensor, columns: int, first_row: int) -> None:
        """Makes the next forward write row `first_row + b` at columns `positions[b]` (`[B, q]` int64), and read
        columns `0..columns`."""
        window = self._window
        window.first_row, window.visible, window.together = first_row, columns, 0
        window.to_rows, window.to_columns = self._places(positions, first_row)
        self._used = max(self._used, first_row + positions.shape[0])

    @abstractmethod
    def _places(self, columns: Tensor, first_row: int, reads: bool = False) -> tuple[Tensor, Tensor]:
        """Rows and columns of the buffers, `[B, n]` int64 each, to write or read `columns` `[B, n]` of the rows from
        `first_row` on."""

    def table_to_read(self, rows: int) -> Tensor | None:
        """Makes the next forward, of `rows` rows, read pages by a table. Returns the table `[rows, pages]` int32,
        pages in the order of columns. None: columns are contiguous, and there is no table."""
        return None

    @property
    def first_row(self) -> int:
        """First row of the last forward."""
        return self._window.first_row

    def layer_at(self, index: int) -> Any:
        """The K/V of the decoder's layer `index`."""
        return self.layers[index]

    def keys_at(self, index: int, columns: Tensor, first_row: int = 0) -> Tensor:
        """Keys `[B, n, kv_heads, d]` of a layer in `columns` (`[B, n]` int64) of the rows from `first_row` on."""
        rows, columns = self._places(columns, first_row, reads=True)
        keys: Tensor = self.layers[index].keys[rows, :, columns]
        return keys

    # ---- rows -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def copy_rows(self, source: list[int], destination: list[int], columns: list[int], differing: int = 0) -> None:
        """Copies the first `columns[i]` columns of row `source[i]`, in whole pages, to row `destination[i]`; sources
        and destinations are disjoint. Rows will write the last `differing` of these columns again."""

    @abstractmethod
    def move_rows(self, source: list[int], destination: list[int], columns: list[int], active: int) -> None:
        """Moves rows into gaps, so that `active` rows come first. Frees the memory of other rows and of the
        overwritten ones."""

    def move_columns(self, source: Tensor, destination: Tensor) -> None:
        """Copies columns `source[b]` of row b to columns `destination[b]` (`[B, n]` int64 each); they may overlap,
        without duplicates."""
        (rows, columns), (to_rows, to_columns) = (self._places(each, 0) for each in (source, destination))
        for layer in self._allocated:  # all reads are gathered before the first write
            layer.keys[to_rows, :, to_columns] = layer.keys[rows, :, columns]  # [B, n, kv, d]
            layer.values[to_rows, :, to_columns] = layer.values[rows, :, columns]

    def export_row(self, row: int, start: int, stop: int) -> RowKV:
        """Copies a row's columns `start..stop`; empty if there are none."""
        states: RowKV = {}
        for index, layer in enumerate(self.layers):
            if layer.is_initialized and stop > start:
                keys, values = layer.read(row, 1, stop)  # [1, kv, stop, d] each
                states[index] = keys[0, :, start:].clone(), values[0, :, start:].clone()
        return states

    def import_row(self, row: int, start: int, states: RowKV) -> None:
        """Writes the result of :meth:`export_row` to a row's columns from `start` on."""
        for index, (keys, values) in states.items():
            stop = start + keys.shape[1]
            self.reserve([stop], row)
            self.point_at(torch.arange(start, stop, device=keys.device)[None], 0, row)
            self.layers[index].update(keys[None], values[None])

    def with_offsets(self, device: torch.device) -> "KVCache":
        """Gives all rows an offset of 0; returns the cache."""
        self.offsets = torch.zeros(self.rows, dtype=torch.int64, device=device)
        return self

    # ---- memory -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def give_back(self, first: int, end: int, kept: int = 0) -> None:
        """Frees the memory of rows `first..end`, except their first `kept` columns."""

    def trim(self, first: int, lengths: Sequence[int]) -> None:
        """Frees columns that padding has written: the rows from `first` on have `lengths` columns."""
        for row, length in enumerate(lengths, first):
            if pages_of(length) * PAGE_COLUMNS < max(lengths):
                self.give_back(row, row + 1, length)

    def clear(self) -> None:
        """Forgets all rows: a generation begins."""
        self.give_back(0, self._used)
        self._used = 0

    def wipe(self) -> None:
        """Forgets all rows, and sets all K/V to zeros: a failed drafter may have left NaN."""
        self.clear()
        for layer in self._allocated:
            for buffer in layer.buffers:
                buffer.clear()

    @abstractmethod
    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Bytes of the cache with rows of `lengths` columns: at their peak if it can tell, of the whole cache if
        memory is taken at once."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of the cache without rows."""

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of a row."""
        return sum(states[0, :, 0].nbytes for layer in self._allocated for states in (layer.keys, layer.values))

    @property
    def _allocated(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]

    # ---- other caches -----------------------------------------------------------------------------------------------

    @abstractmethod
    def like(self, network: PreTrainedModel) -> "KVCache":
        """Makes a cache for another `network`, of the same size and kind."""

    @abstractmethod
    def beside(self, layers: int, more: int) -> "KVCache":
        """Makes a cache of the same kind and number of rows, with `layers` layers and `more` columns per row."""

    def for_drafts(self) -> "KVCache":
        """The cache in which the policy's copy drafts: a verification overwrites the K/V of its drafts."""
        return self

    # ---- recurrent states, which :class:`~.States` has; K/V needs nothing -------------------------------------------

    has_states = False
    """Whether layers keep states beside K/V."""
    held: dict[Any, Any] = {}
    """Inputs that the last verification stored, by layer, for replay into the recurrent states."""
    is_repeatable = True
    """Whether a forward that is not a prompt's may run twice."""
    fixed_bytes = 0
    """Bytes that all rows take whatever their columns: states."""
    is_divisible = True
    """Whether some columns of a row can be kept without the earlier ones."""

    def begin_drafts(self, rows: int) -> None:
        """Makes the drafts of `rows` rows begin at the committed states."""

    def commit(self, lengths: Sequence[int]) -> None:
        """Commits the first `lengths[b]` tokens that the last forward fed for row b to the states."""

    def forget(self, rows: Sequence[int]) -> None:
        """Resets the states of `rows` for new texts."""

    def feeds(self, prompt: Sequence[int] | None = None, is_step: bool = False, counts: Tensor | None = None) -> None:
        """Announces the next forward's tokens: `prompt[b]` tokens of row b's prompt, then padding; or one text token
        per row (`is_step`), or where `counts` (`[B]` int64, 0 or 1) says so; or tokens of which :meth:`commit` commits
        some."""
