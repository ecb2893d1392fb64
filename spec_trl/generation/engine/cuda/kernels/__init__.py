"""Holds the engine's Triton kernels. Modules here import Triton: ask `run_on` first."""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch


P = ParamSpec("P")
T = TypeVar("T")

_LIBRARY = torch.library.Library("spec_trl", "FRAGMENT")
WORK_SPACE = 2**28
"""Bytes that attention takes at once beside its result, about: longer prompts attend in parts."""


@functools.cache
def run_on(device: torch.device) -> bool:
    """Whether the kernels run on `device`: NVIDIA or AMD, compute capability 8.0 or newer, with Triton installed."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def operator(
    name: str, shapes: Callable[..., Any], writes: Sequence[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function the operator `spec_trl::<name>`, without a gradient: `torch.compile` and the capture of CUDA
    graphs go through it.

    `torch.library.custom_op` does the same, and then spends three times as much Python on each call.

    Args:
        shapes: takes the same arguments and returns tensors like the function's, of any content.
        writes: names of the arguments that the function writes to.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=writes))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"spec_trl::{name}", shapes, lib=_LIBRARY)
        call = getattr(torch.ops.spec_trl, name).default

        @functools.wraps(function)
        def operate(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = call(*args, **kwargs)
            return result

        return operate

    return register
