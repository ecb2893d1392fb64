"""The machine's ceilings: copy bandwidth, bf16 GEMM rate, launch latency; and the versions that all else ran with."""

import importlib.metadata
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from .part import Part
from .timing import compare, copy_bandwidth, synchronize


PACKAGES = (
    "torch", "triton", "transformers", "trl", "accelerate", "datasets", "pyarrow", "huggingface_hub", "pydantic",
    "numpy", "flash-attn", "humming-kernels", "gptqmodel",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Installed versions; None: absent."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def gemm(part: Part) -> dict[str, Any]:
    """FLOP/s of a large product in bfloat16."""
    n = 256 if part.is_smoke else 8192
    x, w = (torch.randn(n, n, device=part.device).bfloat16() for _ in range(2))  # [n, n]
    timing = compare({"gemm": [partial(F.linear, x, w)]}, part.device, captured=False)["gemm"]
    return {"n": n, "flops": 2 * n**3 / timing.seconds, "seconds": timing.seconds}


def launch(part: Part) -> dict[str, Any]:
    """Seconds that the host needs per launch of a small kernel, and that the same launch takes within a graph."""
    x = torch.randn(32, device=part.device)
    count = 200
    times = []
    for _ in range(9):
        synchronize(part.device)
        started = time.perf_counter()
        for _ in range(count):
            x.mul_(1.0)
        synchronize(part.device)
        times.append((time.perf_counter() - started) / count)
    captured = compare({"launch": [partial(x.mul_, 1.0)] * count}, part.device)["launch"]
    return {"eager_seconds": median(times), "captured_seconds": captured.seconds}


def properties(part: Part) -> dict[str, Any]:
    """What torch knows of the device."""
    if part.device.type != "cuda":
        return {"name": "cpu"}
    found = torch.cuda.get_device_properties(part.device)
    return {
        "name": found.name,
        "capability": list(torch.cuda.get_device_capability(part.device)),
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("machine", __doc__, arguments)
    part.measure("device", partial(properties, part))
    part.measure("versions", versions)
    part.measure("copy_bandwidth", partial(copy_bandwidth, part.device))
    part.measure("gemm_bfloat16", partial(gemm, part))
    part.measure("launch", partial(launch, part))
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
