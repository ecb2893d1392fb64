"""Captures: what the host does for each on a pretended CUDA, and which ones a check refuses."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl import cuda_graphs
from spec_trl.generation.engine.cuda.graph_capture import CudaRecorder, GraphBudget
from spec_trl.quantization.kernels import kernel_times


DEVICE = torch.device("cpu")


class Graph:
    """A capture that notes its calls."""

    def capture_begin(self, **options: Any) -> None:
        CALLS.append("begin")

    def capture_end(self) -> None:
        CALLS.append("end")

    def replay(self) -> None: ...


CALLS: list[str] = []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cuda_graphs, "capture_stream", lambda device: stream)
    monkeypatch.setattr("spec_trl.generation.engine.cuda.graph_capture.capture_stream", lambda device: stream)

    @contextmanager
    def on(stream: object) -> Any:
        CALLS.append("enter")
        try:
            yield
        finally:
            CALLS.append("leave")

    for name, stand_in in dict(
        CUDAGraph=Graph, stream=on, device=nullcontext, current_stream=lambda: stream, graph_pool_handle=lambda: 1,
        memory_snapshot=lambda pool: [],
        empty_cache=lambda: CALLS.append("empty"),
        synchronize=lambda: None, get_sync_debug_mode=lambda: 0, set_sync_debug_mode=lambda mode: None,
    ).items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)


def test_memory_is_emptied_once_for_all_captures(cuda: None) -> None:
    """And again if memory ends in a capture, which cannot free what the allocator has cached: it is tried twice."""
    recorder = CudaRecorder(DEVICE)
    for _ in range(5):
        recorder.record(lambda: (torch.zeros(1), None))
    assert CALLS.count("empty") == 1 and CALLS.count("begin") == CALLS.count("end") == 6
    assert CALLS.index("empty") < CALLS.index("begin")

    def too_large() -> Any:
        if CALLS[-1] == "begin" and CALLS.count("empty") == 1:
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros(1), None

    recorder.record(too_large)
    assert CALLS.count("empty") == 2 and CALLS.count("begin") == CALLS.count("end") == 8


def _is_held() -> bool:
    """Whether another thread could not capture now."""
    with ThreadPoolExecutor(1) as other:
        taken = other.submit(cuda_graphs.CAPTURING.acquire, blocking=False)
        if taken.result():
            other.submit(cuda_graphs.CAPTURING.release).result()
        return not taken.result()


def test_kernels_are_measured_while_nobody_captures(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All captures share a stream: what another call launches there would be part of this capture, or break it."""
    monkeypatch.setattr(kernel_times, "capture_stream", cuda_graphs.capture_stream)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    held: list[bool] = []
    on_stream = torch.cuda.stream
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: held.append(_is_held()) or on_stream(stream)
    )
    kernel_times.time_replays("triton", 1, [lambda: torch.zeros(1)])
    assert held == [True, True] and not _is_held() and CALLS.count("begin") == 1


def test_a_failing_capture_ends_and_leaves_its_stream(cuda: None) -> None:
    def fail() -> Any:
        if CALLS[-1] == "begin":
            raise RuntimeError("no kernel")
        return torch.zeros(1), None

    recorder = CudaRecorder(DEVICE)
    with pytest.raises(RuntimeError, match="no kernel"):
        recorder.record(fail)
    assert CALLS.count("begin") == CALLS.count("end") == 2 and CALLS[-2:] == ["end", "leave"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capture_that_is_wrong_in_one_row_is_refused(cuda: None, dtype: torch.dtype) -> None:
    """Others may be off by rounding, and some by another expert."""
    budget = GraphBudget(CudaRecorder(DEVICE), 1e9)

    def passes(found: Tensor, expected: Tensor) -> bool:
        try:
            budget.record_checked(lambda: (torch.zeros(1), None), lambda _: (found, expected), "those", dtype)
        except RuntimeError as error:
            assert "its logits differ from those" in str(error)
            return False
        return True

    expected = torch.randn(8, 3, 50, generator=torch.Generator().manual_seed(0))  # [B, q, V]
    routed = expected.clone()
    routed[2] += 0.3 * expected.flip(0)[2]
    assert passes(expected * 1.001, expected) and passes(routed, expected)
    for wrong in (torch.nan, 0.0, expected[0]):
        found = expected.clone()
        found[5] = wrong
        assert not passes(found, expected)
    assert not passes(expected * 1.3, expected)  # too many
    expected[5] = torch.nan  # of broken weights, which is reported elsewhere
    assert passes(found, expected)
