"""One captured forward, and the shapes that forwards are captured for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_graphs import Recording


SMALLEST_COLUMNS = 256

T = TypeVar("T")


class ForwardKey(NamedTuple):
    """What a forward is captured for: numbers of rows, tokens per row and columns that are read, and autocast."""

    rows: int
    queries: int
    columns: int
    autocast: torch.dtype | None

    def serves(self, other: "ForwardKey") -> bool:
        """Whether a call of `other` can run padded to this."""
        fits = self.rows >= other.rows and self.columns >= other.columns
        return fits and (self.queries, self.autocast) == (other.queries, other.autocast)


@dataclass
class CapturedForward:
    """A forward over static buffers."""

    key: ForwardKey
    tokens: Tensor  # [rows, q], static
    positions: Tensor  # [rows, q], static
    recording: Recording
    bytes: int  # that it took
    filled: int  # rows of the buffers that a call has filled; the others stand at position 0
    replays: int = 0

    def fill(self, tokens: Tensor, positions: Tensor) -> None:
        """Puts this call into the buffers: a replay writes its K/V, and no other."""
        rows = len(tokens)
        self.tokens[:rows] = tokens
        self.positions[:rows] = positions
        if self.filled > rows:
            self.positions[rows:] = 0  # so that free rows read one column, not many
        self.filled = rows


def uncached_autocast(device: torch.device, dtype: torch.dtype | None, work: Callable[[], T]) -> Callable[[], T]:
    """`work` to be captured under autocast to `dtype`; None: without it. Autocast keeps the casts of fp32 weights that
    have no copies until it ends; a graph must not read those."""

    def run() -> T:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            return work()

    return work if dtype is None else run


def cache_rows(rows: int) -> int:
    """Rows of a cache for `rows` in flight: a power of two up to 8, then a multiple of 8, of 32 beyond 64."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 32
    return -(-rows // step) * step


def row_bucket(rows: int, limit: int) -> int:
    """Rows that a batch of `rows` is padded to: 8, 16, 32, 64 or a multiple of 32, at most the `limit` of the cache.

    They are few, since each is captured for itself while a rollout's rows finish, which takes about four forwards, and
    since padding costs little: up to some hundred tokens a forward waits for its weights, and a free row reads one
    column of K/V.
    """
    bucket = max(8, 1 << (rows - 1).bit_length()) if rows <= 64 else -(-rows // 32) * 32
    return min(bucket, limit)


def column_bucket(columns: int, limit: int) -> int:
    """Columns that `columns` are padded to where attention reads a mask: a power of two, at most `limit`."""
    return min(max(SMALLEST_COLUMNS, 1 << (columns - 1).bit_length()), limit)


def pad(values: Tensor, rows: int) -> Tensor:
    """A copy `[rows, ...]` of `values` `[B, ...]`, with zeros after them: free rows then read one column, not many."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, rows - len(values)))
