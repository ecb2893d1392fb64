"""Captures device work to be launched again as a whole: CUDA graphs."""

import gc
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


CAPTURING = threading.Lock()
"""Held while a forward is captured: whatever else waits for the device meanwhile would fail, in any thread."""
_TIMED_REPLAYS = 20

Outputs = tuple[Tensor, Tensor | None]
"""Logits, and features of a listened runner."""
T = TypeVar("T")


class Recording(NamedTuple):
    """A captured forward: `replay()` runs it again, into the same `logits` and `features` (of a listened runner)."""

    replay: Callable[[], None]
    logits: Tensor
    features: Tensor | None = None


class CudaRecorder:
    """CUDA graphs of one device that share a memory pool, since they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, forward: Callable[[], Outputs]) -> Recording:
        """Captures the device work of `forward`, which must not wait for the device."""
        with CAPTURING, torch.cuda.device(self._device):
            self._refuse_waiting(forward)
            if self._pool is None:
                # A pool must not lose its last graph while a library's workspace lies in it: this one stays.
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream(self._device)
                self._anchor, _ = self._capture(lambda: torch.zeros(1, device=self._device))
            graph, (logits, features) = self._capture(forward)
        return Recording(graph.replay, logits, features)

    def _refuse_waiting(self, forward: Callable[[], Outputs]) -> None:
        """Raises RuntimeError where `forward` waits for the device: a capture that fails could harm the process."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            forward()
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def _capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.disable()  # a dead graph that is collected now would be reset within the capture
        try:
            # Other threads (data loaders that pin memory) may call CUDA while this one captures.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that fails to end leaves its own stream set
            raise
        finally:
            if collects:
                gc.enable()
        return graph, result

    def seconds(self, replay: Callable[[], None]) -> float:
        """Seconds of the device that one replay takes."""
        with torch.cuda.device(self._device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            replay()
            start.record()
            for _ in range(_TIMED_REPLAYS):
                replay()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / 1e3 / _TIMED_REPLAYS

    def bytes(self) -> int:
        """Bytes of device memory in use now."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # capturing does so too, and what it frees is not the graph's
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


@dataclass
class GraphBudget:
    """What the captured forwards of one model and its drafters, captured by `recorder`, may take together: from
    `limit` bytes on shapes make do with a larger one that is captured, or run eagerly."""

    recorder: CudaRecorder
    limit: float
    bytes: int = 0
    graphs: int = 0
    preparations: int = 0
    """Forwards that ran eagerly on their way to being captured, were captured, or were tried compiled."""
    _warned: bool = field(default=False, repr=False)

    def has_room(self) -> bool:
        """Whether one more may be captured; says so once when not."""
        if self.bytes < self.limit:
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"captured forwards take {self.bytes / 2**30:.2f} GiB, which reaches "
                f"max_graph_memory={self.limit / 2**30:g}: further shapes run padded to a captured one, or eagerly. "
                "Raise max_graph_memory to capture more.",
                stacklevel=2,
            )
        return False

    def record(self, forward: Callable[[], Outputs]) -> tuple[Recording, int]:
        """Captures `forward`; returns also the bytes that it took."""
        before = self.recorder.bytes()
        recording = self.recorder.record(forward)
        taken = max(self.recorder.bytes() - before, 0)
        self.bytes += taken
        self.graphs += 1
        return recording, taken

    def give_back(self, taken: int) -> None:
        """One captured forward is gone, which took `taken` bytes."""
        self.bytes -= taken
        self.graphs -= 1
