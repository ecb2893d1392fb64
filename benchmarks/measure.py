"""What every benchmark needs: time, peak memory, forward counts, and a description of the machine."""

import ctypes
import datetime
import gc
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import transformers
from torch import nn

from spec_trl.measuring.fill_profile import processor_name


RESULTS = Path(__file__).parent / "results"


@dataclass
class Gauge:
    """Filled in when the `with` block that gave it ends: seconds, bytes, or a count."""

    value: float = 0.0


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Gauge]:
    """Wall-clock seconds of the block, the device's queued work included."""
    gauge = Gauge()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    yield gauge
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gauge.value = time.perf_counter() - started


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Gauge]:
    """Peak bytes above the block's start: of the CUDA allocator, or on a CPU of the resident set, sampled."""
    gauge = Gauge()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield gauge
        gauge.value = torch.cuda.max_memory_allocated(device) - before
        return
    if sys.platform == "linux":
        # Freed memory that malloc kept would hide what the block allocates out of it.
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    peak = before = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield gauge
    finally:
        done.set()
        watcher.join()
    gauge.value = max(peak, process.memory_info().rss) - before


@contextmanager
def count_forwards(model: nn.Module) -> Iterator[Gauge]:
    """How often `model` is called inside the block."""
    gauge = Gauge()

    def count(*_: object) -> None:
        gauge.value += 1

    handle = model.register_forward_pre_hook(count)
    try:
        yield gauge
    finally:
        handle.remove()


def describe_machine(device: torch.device) -> dict[str, object]:
    """Processor, accelerator, threads, versions and date, as plain data for a result file."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_average_1min": os.getloadavg()[0],  # well above `threads`: others were running too
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, object]) -> str:
    """One line of `describe_machine` for a Markdown report."""
    where = machine["accelerator"] or f"{machine['cpu']} ({machine['cores']} cores)"
    return (
        f"{where}, {machine['cpu_capability']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, load average at start {machine['load_average_1min']:.1f}, "
        f"{machine['date']}"
    )


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_result(output: Path, result: Mapping[str, object], report: str) -> None:
    """Write `result` to `output` as JSON, `report` beside it as Markdown, and print the report."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    output.with_suffix(".md").write_text(report + "\n")
    print(report)
    print(f"\nwritten: {output} and {output.with_suffix('.md')}")
