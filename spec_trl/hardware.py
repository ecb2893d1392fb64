"""Names the hardware that torch runs on, and what keeps its kernels from using all of it."""

import os
import platform
from pathlib import Path

import torch


# Environment variables by which torch, oneDNN and MKL choose kernels of a CPU.
_SWITCHES = (
    "ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip


def hardware_name(device: torch.device) -> str:
    """The device's name; of a CPU with the number of threads that torch uses, and :func:`kernel_switches`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return ", ".join([processor_name(), f"{torch.get_num_threads()} threads", *kernel_switches()])


def kernel_switches() -> list[str]:
    """The environment variables that are set and change what a CPU computes with."""
    return [f"{name}={os.environ[name]}" for name in _SWITCHES if os.environ.get(name)]


def processor_name() -> str:
    """The CPU's name, as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
    return name or platform.processor() or platform.machine()
