"""Captures CUDA graphs, checks them, limits their memory, and rounds shapes up to buckets."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ....cuda_graphs import CAPTURING, capture, capture_stream


_TIMED_REPLAYS = 20

Outputs = tuple[Tensor, Tensor | None]
"""Logits, and features if the runner has listeners; of a draft loop scores and tokens."""
T = TypeVar("T")


class Recording(NamedTuple):
    """A captured forward: `replay()` runs it into the same `logits`, and `features` with listeners."""

    replay: Callable[[], None]
    logits: Tensor
    features: Tensor | None = None


class CudaRecorder:
    """Captures CUDA graphs on one device. They share a memory pool, since they are replayed one after the other; those
    recorded `apart` share another one. The first gets all the memory that the allocator has cached."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[bool, Any] = {}
        self._anchors: list[torch.cuda.CUDAGraph] = []

    def record(self, forward: Callable[[], Outputs], apart: bool = False) -> Recording:
        """Captures the device work of `forward`, without waits for the device. `apart`: its replay may come
        between two others that share data in the pool."""
        with CAPTURING, torch.cuda.device(self._device):
            stream, current = capture_stream(self._device), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # so that libraries allocate workspaces here, not in the pool
                self._refuse_waiting(forward)
            current.wait_stream(stream)
            if not self._pools:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            if apart not in self._pools:
                # A pool must not lose its last graph while a library's workspace is in it: this graph stays.
                pool = self._pools[apart] = torch.cuda.graph_pool_handle()
                self._anchors.append(capture(lambda: torch.zeros(1, device=self._device), self._device, pool)[0])
            graph, (logits, features) = capture(forward, self._device, self._pools[apart])
        return Recording(graph.replay, logits, features)

    def _refuse_waiting(self, forward: Callable[[], Outputs]) -> None:
        """Raises RuntimeError if `forward` waits for the device: a failing capture could harm the process."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            forward()
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def seconds(self, replay: Callable[[], None], replays: int = _TIMED_REPLAYS) -> float:
        """Device seconds of a replay, the mean of `replays` after a warm-up."""
        with torch.cuda.device(self._device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            replay()
            start.record()
            for _ in range(replays):
                replay()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3 / replays

    def bytes(self) -> int:
        """Bytes of device memory that the allocator holds for captures."""
        pools = map(torch.cuda.memory_snapshot, self._pools.values())
        return sum(segment["total_size"] for segments in pools for segment in segments)


@dataclass
class GraphBudget:
    """Memory limit, in bytes, for the forwards that `recorder` captures of one model and its drafters. Above it, new
    shapes use a larger captured shape, or run eagerly."""

    recorder: CudaRecorder
    limit: float
    bytes: int = 0
    graphs: int = 0
    preparations: int = 0
    """Number of eager forwards before captures, captures, and tried compiled forwards."""
    _warned: bool = field(default=False, repr=False)
    _logits: Tensor | None = field(default=None, repr=False)  # [bytes] uint8

    def allows_more(self) -> bool:
        """Whether another forward may be captured; warns once if not."""
        if self.bytes < self.limit:
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"captured forwards take {self.bytes / 2**30:.2f} GiB, which reaches what they may take, "
                f"{self.limit / 2**30:g} GiB (max_graph_memory, or less where rows need the memory): further shapes "
                "run padded to a captured one, or eagerly. Raise max_graph_memory where more is free.",
                stacklevel=2,
            )
        return False

    def record(
        self, forward: Callable[[], Outputs], graphs: int = 1, apart: bool = False
    ) -> tuple[Recording, int]:
        """Captures `forward`, as part of the graph before if `graphs` is 0; returns the recording and its bytes.
        `apart`: as for the recorder."""
        before = self.recorder.bytes()
        recording = self.recorder.record(forward, apart)
        taken = max(self.recorder.bytes() - before, 0)
        self.bytes += taken
        self.graphs += graphs
        return recording, taken

    def record_checked(
        self,
        work: Callable[[], Outputs],
        compared: Callable[[Recording], tuple[Tensor, Tensor]],
        whose: str,
        dtype: torch.dtype,
        apart: bool = False,
    ) -> tuple[Recording, int]:
        """:meth:`record` for `work` of a network in `dtype`.

        Raises:
            RuntimeError: a replay's logits or scores differ much from others, of `whose`; `compared` returns both.
        """
        recording, taken = self.record(work, apart=apart)
        try:
            recording.logits.fill_(float("nan"))  # so that a replay without effect fails the check
            recording.replay()
            if not _agree(*compared(recording), dtype):
                raise RuntimeError(f"its logits differ from {whose}")
        except BaseException:
            self.give_back(taken)
            raise
        return recording, taken

    def give_back(self, taken: int) -> None:
        """Subtracts a freed captured forward of `taken` bytes."""
        self.bytes -= taken
        self.graphs -= 1
        if self.graphs == 0:
            self.bytes, self._logits = 0, None

    def logits(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the logits of a captured forward, shared by all. If it is too small, a larger one is made, in
        powers of two, and older captures use the smaller one."""
        size = math.prod(shape) * dtype.itemsize
        if self._logits is None or self._logits.nbytes < size:
            self._logits = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=device)
            self.bytes += self._logits.nbytes
        return self._logits[:size].view(dtype).view(*shape)


_ABOUT = 0.5
"""Error of another computation, over the size of a token's logits: unrelated logits differ by more than their size,
and another expert in some layers moves logits by less."""


def _agree(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two forwards of a network in `dtype` agree: half of the tokens or more up to rounding, and every token
    roughly, since rounding may route it to other experts. Detects wrong captures, even of some rows, but neither a
    loss of precision nor a kernel that is wrong in both."""
    narrowest = min(dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
    tolerance = {2: 0.15, 4: 1e-2, 8: 1e-6}[narrowest.itemsize]
    wide = expected.double()
    known = wide.isfinite().all(dim=-1)  # [B, q]; NaN of broken weights is reported elsewhere
    error, size = (each.norm(dim=-1)[known] for each in (logits.double() - wide, wide))  # [n] each
    if not len(size):
        return True
    is_near = error <= _ABOUT * size.clamp(min=size.mean())
    return bool(is_near.all() and (error <= tolerance * size).double().mean() >= 0.5)


SMALLEST_COLUMNS = 256


class ForwardKey(NamedTuple):
    """Shape of a captured forward: numbers of rows, tokens per row and columns read, and autocast."""

    rows: int
    queries: int
    columns: int
    autocast: torch.dtype | None

    def serves(self, other: "ForwardKey") -> bool:
        """Whether a call of `other` can run padded to this shape."""
        fits = self.rows >= other.rows and self.columns >= other.columns
        return fits and (self.queries, self.autocast) == (other.queries, other.autocast)


@dataclass
class CapturedForward:
    """A forward over static buffers."""

    key: ForwardKey
    tokens: Tensor  # [rows, q], static
    positions: Tensor  # [rows, q], static
    recording: Recording
    bytes: int  # of device memory
    filled: int  # rows of the buffers that a call has filled; the others have position 0
    replays: int = 0
    counts: Tensor | None = None  # [rows] int64, static: tokens that states take
    commit: Recording | None = None  # of these tokens; None: the forward takes them
    inputs: Any = None  # of the commit, in the pool: as long as they live, no other capture gets their memory

    def fill(self, tokens: Tensor, positions: Tensor) -> None:
        """Copies this call into the buffers: a replay writes only K/V of this call."""
        rows = len(tokens)
        self.tokens[:rows] = tokens
        self.positions[:rows] = positions
        if self.filled > rows:
            self.positions[rows:] = 0  # so that free rows read one column, not many
        if self.counts is not None and self.commit is None and (self.filled != rows or not self.replays):
            self.counts[:rows], self.counts[rows:] = 1, 0
        self.filled = rows

    @property
    def held(self) -> dict[Any, Any]:
        """As of a cache with states."""
        return {} if self.commit is None else {None: self._commit}

    def _commit(self, taken: Any) -> None:
        assert self.counts is not None and self.commit is not None
        self.counts.copy_(taken.lengths)
        self.commit.replay()


def uncached_autocast(device: torch.device, dtype: torch.dtype | None, work: Callable[[], T]) -> Callable[[], T]:
    """`work` to be captured under autocast to `dtype`; None: without it. Autocast caches casts of fp32 weights until
    it ends; a graph must not read those."""

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

    Buckets are few, since a capture takes about four forwards and rows finish one by one, and since padding costs
    little: up to some hundred tokens a forward waits for its weights, and a free row reads one column of K/V.
    """
    bucket = max(8, 1 << (rows - 1).bit_length()) if rows <= 64 else -(-rows // 32) * 32
    return min(bucket, limit)


def column_bucket(columns: int, limit: int) -> int:
    """`columns` with padding, if attention reads a mask: a power of two, at most `limit`."""
    return min(max(SMALLEST_COLUMNS, 1 << (columns - 1).bit_length()), limit)


def pad(values: Tensor, rows: int) -> Tensor:
    """A copy `[rows, ...]` of `values` `[B, ...]`, with zeros after them: free rows then read one column, not many."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, rows - len(values)))
