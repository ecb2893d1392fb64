"""Triton kernels of the engine. Modules here import Triton: ask `run_on` first."""

import functools
from importlib.util import find_spec

import torch


@functools.cache
def run_on(device: torch.device) -> bool:
    """Whether the kernels run on `device`: NVIDIA or AMD, compute capability 8.0 or newer, with Triton installed."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
