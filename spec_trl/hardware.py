"""Names the hardware that torch runs on, and the obstacles to using all of it."""

import os
import platform
from pathlib import Path

import torch


# Environment variables that make torch, oneDNN and MKL choose kernels of a CPU.
_SWITCHES = (
    "ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
_BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
"""Instructions that make bfloat16 fast on a CPU, by name in /proc/cpuinfo."""


def hardware_name(device: torch.device) -> str:
    """The device's name; of a CPU with the number of threads that torch uses, and :func:`kernel_switches`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return ", ".join([processor_name(), f"{torch.get_num_threads()} threads", *kernel_switches()])


def kernel_switches() -> list[str]:
    """The set environment variables that change a CPU's kernels."""
    return [f"{name}={os.environ[name]}" for name in _SWITCHES if os.environ.get(name)]


def processor_name() -> str:
    """The CPU's name, as the system gives it."""
    lines = _cpuinfo().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
    return name or platform.processor() or platform.machine()


def instruction_set() -> str:
    """The CPU's instructions, such as "AVX512 avx512_bf16": torch's level, and instructions for bfloat16."""
    flags = _cpuinfo().split()
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(flag for flag in _BFLOAT16_FLAGS if flag in flags)])


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""
