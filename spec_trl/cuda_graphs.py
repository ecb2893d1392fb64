"""Captures CUDA graphs on one stream per device."""

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch


T = TypeVar("T")
CAPTURING = threading.RLock()
"""Held during a capture, and by what launches on its stream: work in any thread that waits for the device would
fail."""


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures on `device`: libraries hold a workspace per stream."""
    return torch.cuda.Stream(device)


def capture(work: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures `work`, on `device`, the current one; returns the graph and the result of `work`. Without `pool` the
    graph has memory of its own.

    `torch.cuda.graph` waits for the device and empties the caches of device and pinned memory before each capture: the
    next tensors and sends would allocate anew. Here they are emptied only if memory runs out in a capture, within
    which the allocator frees nothing; the capture is then tried again.
    """
    with CAPTURING:
        try:
            return _capture(work, device, pool)
        except torch.OutOfMemoryError:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return _capture(work, device, pool)


def _capture(work: Callable[[], T], device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, T]:
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # garbage collection would reset a dead graph within the capture
    try:
        with torch.cuda.stream(capture_stream(device)):
            # Other threads (data loaders that pin memory) may call CUDA while this one captures.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph, result
