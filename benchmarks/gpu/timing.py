"""Time of device work: captured graphs over rotating copies, replayed in alternation, medians."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor


CACHE_BYTES = 256 << 20
"""What the copies that a measurement goes round together hold at least: several times the L2 of any GPU."""
MOST_COPIES, WARM_UPS = 256, 2

Work = Callable[[], object]


@dataclass
class Timing:
    """Seconds of one call: median, fastest and slowest sample."""

    seconds: float
    low: float
    high: float


def copies_for(size: int, device: torch.device) -> int:
    """How many copies of `size` bytes a measurement should go round so that no cache holds them."""
    return min(MOST_COPIES, -(-CACHE_BYTES // max(size, 1))) if device.type == "cuda" else 1


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    variants: Mapping[str, Sequence[Work]], device: torch.device, repeats: int = 15, captured: bool = True
) -> dict[str, Timing]:
    """Times the variants in turns: A B C A B C ...

    Args:
        variants: by name; the works of one are the same on different copies of its inputs, one call each.
        device: where they run.
        repeats: samples of each, one pass over all copies; fewer without a GPU, where all is only tried out.
        captured: replay them as CUDA graphs, so that launches do not count.
    """
    captured = captured and device.type == "cuda"
    repeats = repeats if device.type == "cuda" else min(repeats, 3)
    passes = {name: _capture(works) if captured else partial(_call, works) for name, works in variants.items()}
    for run in passes.values():
        for _ in range(WARM_UPS):
            run()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in passes.items():
            samples[name].append(once(run, device) / len(variants[name]))
    return {name: Timing(median(times), min(times), max(times)) for name, times in samples.items()}


def once(work: Work, device: torch.device) -> float:
    """Seconds of one `work()`: between events on a GPU, else by the wall clock."""
    if device.type != "cuda":
        return seconds_of(work)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()  # the device is busy until the timed one is launched
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def seconds_of(work: Work) -> float:
    """By the wall clock."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, the median of many."""
    size = (4 << 30) if device.type == "cuda" else 1 << 22
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()  # [size / 4]
    target = torch.empty_like(source)
    timing = compare({"copy": [partial(target.copy_, source)]}, device, captured=False)["copy"]
    return 2 * source.nbytes / timing.seconds


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖ in float32; NaN where anything is."""
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def _call(works: Sequence[Work]) -> None:
    for work in works:
        work()


def _capture(works: Sequence[Work]) -> Work:
    """One CUDA graph of all `works`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates what must not happen while capturing
        for _ in range(WARM_UPS):
            _call(works)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [work() for work in works]
    del outputs
    return graph.replay
