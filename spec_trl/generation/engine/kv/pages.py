"""K/V in pages that a table points to, on CUDA, where memory is not taken by writing. The host stores in plain Python
which row has which page, and sends only changes to the device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .base import PAGE_COLUMNS, KVCache, Window, copy_rows_of, pages_of
from .cache import RaggedLayer
from .memory import sent


EMPTY = 0
"""The page that is read for columns that a row does not have: zeros, never written."""


class Change(NamedTuple):
    """The pages from which the `place`-th page of a row's columns is now read, and to which it is written."""

    row: int
    place: int
    read: int
    written: int


class Pages:
    """Pages 1 to `count`, assigned to `rows` in the order of columns. Page 0 is :data:`EMPTY`, and page `count + 1`
    the waste, which is never read.

    Rows with the same beginning share its pages:

        row 0   7  3  5          shared: 2     page   rows
        row 1   7  3  9  2       shared: 2     7, 3   2        read by both rows, written by none any more
        row 2   4                shared: 0     5, 9, 2, 4      1

    Attributes:
        of_row: pages by row.
        shared: by row, number of first pages that are or were shared: their K/V exists, and computing it again writes
            to the waste.
        most: peak number of pages in use.
    """

    def __init__(self, count: int, rows: int) -> None:
        self.count, self.waste = count, count + 1
        self._free = list(range(count, EMPTY, -1))
        self._rows_of = [0] * (count + 1)  # by page: number of rows that have it
        self._changed: set[tuple[int, int]] = set()
        self.of_row: list[list[int]] = [[] for _ in range(rows)]
        self.shared = [0] * rows
        self.most = 0

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def only_of(self, rows: Sequence[int]) -> int:
        """Number of pages that only `rows` have."""
        counts = Counter(page for row in rows for page in self.of_row[row])
        return sum(count == self._rows_of[page] for page, count in counts.items())

    def grow(self, row: int, count: int) -> None:
        """Extends a row to `count` pages; raises RuntimeError if too few are free."""
        pages = self.of_row[row]
        if count - len(pages) > len(self._free):
            raise RuntimeError(f"row {row} needs {count - len(pages)} more pages of K/V, and {self.free} are free")
        for place in range(len(pages), count):
            page = self._free.pop()
            self._rows_of[page] = 1
            pages.append(page)
            self._changed.add((row, place))
        self.most = max(self.most, self.count - len(self._free))

    def release(self, row: int, kept: int = 0) -> None:
        """Frees all pages of a row except the first `kept`."""
        pages = self.of_row[row]
        for place, page in enumerate(pages[kept:], kept):
            self._rows_of[page] -= 1
            if not self._rows_of[page]:
                self._free.append(page)
            self._changed.add((row, place))
        del pages[kept:]
        self.shared[row] = min(self.shared[row], kept)

    def share(self, source: int, destination: int, count: int) -> None:
        """Shares the first `count` pages of a row with a row without pages."""
        self.of_row[destination] = self.of_row[source][:count]
        for place, page in enumerate(self.of_row[destination]):
            self._rows_of[page] += 1
            self._changed |= {(source, place), (destination, place)}
        self.shared[source] = max(self.shared[source], count)
        self.shared[destination] = count

    def move(self, source: int, destination: int) -> None:
        """Moves all pages of a row to a row without pages."""
        pages = self.of_row[source]
        self._changed.update((row, place) for row in (source, destination) for place in range(len(pages)))
        self.of_row[destination], self.of_row[source] = pages, []
        self.shared[destination], self.shared[source] = self.shared[source], 0

    def changes(self) -> list[Change]:
        """Returns the changes since the last call."""
        changes = []
        for row, place in sorted(self._changed):
            pages = self.of_row[row]
            read = pages[place] if place < len(pages) else EMPTY
            is_written = self.shared[row] <= place < len(pages)
            changes.append(Change(row, place, read, read if is_written else self.waste))
        self._changed.clear()
        return changes


@dataclass
class PagedWindow(Window):
    tables: Tensor | None = None  # [2, rows, pages] int32: where columns are read, and where they are written
    row_columns: int = 0  # most columns of a row
    reads_table: bool = False  # whether attention reads pages by the table; else it gets contiguous columns


class PagedCache(KVCache):
    """Columns in pages of 64, taken as rows grow, and shared by rows with the same prompt.
    A layer has a pool `[2 + pages, kv_heads, 64, head_dim]` for keys and one for values; one table serves all layers,
    of 8 pages for example:

        tables[0]   7 3 5 0      column 70 of the first row: page 3, place 6. A column of no row is read from page 0
        tables[1]   9 9 5 9      where it is written: pages 7 and 3 are shared, and known

    Page 9, the last one, is never read: padding, free rows of a captured forward and tokens that are fed again write
        there, possibly NaN. Page 0 is never written: masked columns are zeros.

    Pools and tables keep their addresses, so captured forwards stay valid as long as the cache. The host sends the
    changes of :class:`Pages` in one copy, outside of captured forwards, and never reads the device.
    """

    def __init__(self, layers: int, rows: int, columns: int, pages: int) -> None:
        self._paged = PagedWindow(layers, 2 + pages, PAGE_COLUMNS, row_columns=columns)
        super().__init__(self._paged, [PagedLayer(self._paged) for _ in range(layers)], rows, columns)
        self.pages = Pages(pages, rows)

    @classmethod
    def with_pages(cls, network: PreTrainedModel, rows: int, columns: int, pages: int | None) -> "PagedCache":
        """Makes a cache with a layer per decoder layer of the network, and `pages` pages, at least enough for one row
        and at most for all rows; None: for all rows."""
        layers, of_row = network.config.get_text_config(decoder=True).num_hidden_layers, pages_of(columns)
        most = rows * of_row
        return cls(layers, rows, columns, most if pages is None else min(max(pages, of_row), most))

    def like(self, network: PreTrainedModel) -> "PagedCache":
        return self.with_pages(network, self.rows, self.columns, self.pages.count)

    def beside(self, layers: int, more: int) -> "PagedCache":
        pages = self.pages.count + self.rows * pages_of(more)
        return PagedCache(layers, self.rows, self.columns + more, pages)

    def point_at(self, positions: Tensor, columns: int, first_row: int) -> None:
        super().point_at(positions, columns, first_row)
        self._paged.reads_table = False

    def table_to_read(self, rows: int) -> Tensor:
        assert self.tables is not None
        self._paged.reads_table = True
        pairs = -(-self._paged.visible // (2 * PAGE_COLUMNS))  # of pages that hold the columns which are read
        return self.tables[0, self.first_row : self.first_row + rows, : 2 * pairs]

    def reserve(self, lengths: Sequence[int], first_row: int = 0) -> None:
        for row, length in enumerate(lengths, first_row):
            self.pages.grow(row, pages_of(length))
        self._used = max(self._used, first_row + len(lengths))
        self._send_changes()

    def copy_rows(self, source: list[int], destination: list[int], columns: list[int], differing: int = 0) -> None:
        if self.offsets is not None:
            copy_rows_of([self.offsets], source, destination)
        pairs = []  # pairs of pages: from, to
        for row, to, count in zip(source, destination, columns, strict=True):
            shared, pages = max(count - differing, 0) // PAGE_COLUMNS, pages_of(count)
            self.pages.release(to)
            self.pages.share(row, to, shared)
            self.pages.grow(to, pages)
            pairs += [(self.pages.of_row[row][place], self.pages.of_row[to][place]) for place in range(shared, pages)]
        pools = [pool for layer in self._allocated for pool in (layer.keys, layer.values)]
        if pairs and pools:
            before, after = sent(torch.tensor(pairs), pools[0].device).unbind(1)  # [n] each
            for pool in pools:
                pool[after] = pool[before]
        self._used = max([self._used, *(row + 1 for row in destination)])
        self._send_changes()

    def move_rows(self, source: list[int], destination: list[int], columns: list[int], active: int) -> None:
        if self.offsets is not None:
            copy_rows_of([self.offsets], source, destination)
        for row, to in zip(source, destination, strict=True):
            self.pages.release(to)
            self.pages.move(row, to)
        self.give_back(active, self._used)
        self._used = active

    def give_back(self, first: int, end: int, kept: int = 0) -> None:
        for row in range(first, end):
            self.pages.release(row, pages_of(kept))
        self._send_changes()

    def clear(self) -> None:
        super().clear()
        self.pages.most = 0

    def bytes_of(self, lengths: Sequence[int]) -> int:
        return self.pages.most * PAGE_COLUMNS * self.column_bytes

    @property
    def tables(self) -> Tensor | None:
        """The device's tables `[2, rows, pages]` int32 of pages for reading, and for writing; None: no forward has
        run."""
        return self._paged.tables

    @property
    def held_bytes(self) -> int:
        return (2 + self.pages.count) * PAGE_COLUMNS * self.column_bytes

    def _places(self, columns: Tensor, first_row: int, reads: bool = False) -> tuple[Tensor, Tensor]:
        if self.tables is None:
            self._paged.tables = self._make_tables(columns.device)
            self._send_changes()
        assert self.tables is not None
        table = self.tables[0 if reads else 1]  # [rows, pages]
        rows = torch.arange(first_row, first_row + len(columns), device=columns.device)[:, None]  # [B, 1]
        return table[rows, columns // PAGE_COLUMNS].long(), columns % PAGE_COLUMNS  # [B, n] each

    @torch.inference_mode(False)  # also written outside of inference mode
    def _make_tables(self, device: torch.device) -> Tensor:
        width = -(-pages_of(self.columns) // 2) * 2  # an even number for spans (`MaskPlan.spans`)
        nothing = torch.tensor([EMPTY, self.pages.waste], dtype=torch.int32, device=device)
        return nothing[:, None, None].repeat(1, self.rows, width)

    @torch.inference_mode(False)
    def _send_changes(self) -> None:
        """Writes the changes into the device's tables, in one copy, if there are tables."""
        tables = self.tables
        if tables is None or not (changes := self.pages.changes()):
            return
        _, rows, width = tables.shape
        read_at = [row * width + place for row, place, _, _ in changes]
        where = read_at + [rows * width + index for index in read_at]
        pages = [change.read for change in changes] + [change.written for change in changes]
        at, values = sent(torch.tensor([where, pages]), tables.device)  # [n] each
        tables.view(-1).scatter_(0, at, values.int())


class PagedLayer(RaggedLayer):
    def __init__(self, window: PagedWindow) -> None:
        super().__init__(window)
        self._paged = window

    def read(self, first_row: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        tables = self._paged.tables
        assert tables is not None
        pages = tables[0, first_row : first_row + rows, : pages_of(columns)]  # [B, p]
        keys, values = (pool.transpose(0, 1)[:, pages] for pool in (self.keys, self.values))  # [kv, B, p, 64, d]
        keys, values = (states.flatten(2, 3).transpose(0, 1) for states in (keys, values))  # [B, kv, p * 64, d]
        return keys[:, :, :columns], values[:, :, :columns]

    def get_max_length(self) -> int:
        return self._paged.row_columns

    get_max_cache_shape = get_max_length

    def _visible(self, rows: int) -> tuple[Tensor, Tensor]:
        return (self.keys, self.values) if self._paged.reads_table else super()._visible(rows)
