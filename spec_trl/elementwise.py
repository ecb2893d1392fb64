"""Functions of single numbers on a CPU: a number has the same bits as result wherever in a tensor it stands.

torch computes in registers; the numbers at the end of a thread's share that fill none go through other code, whose
sigmoid, SiLU, tanh-GELU and softplus round otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2CLS


_NUMBERS = 64  # that one step of torch's loops takes, in 16 bits; half as many in float32, a quarter without AVX-512
_SHARE = 32768  # numbers for which torch wakes another thread (at::internal::GRAIN_SIZE)


def by_registers(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), for a function of single numbers."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return function(x)
    size = x.numel()
    shares = max(1, min(torch.get_num_threads(), -(-size // _SHARE)))
    missing = -size % (_NUMBERS * shares)  # then threads' shares are multiples of `_NUMBERS` too
    if missing == 0 and x.is_contiguous():
        return function(x)
    flat = x.reshape(-1)
    return function(F.pad(flat, (0, missing)) if missing else flat)[:size].view(x.shape)


class ByRegisters(nn.Module):
    """An activation by :func:`by_registers`."""

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape → the same shape"""
        return by_registers(super().forward, x)


_ACTIVATIONS = frozenset(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())


@functools.cache
def activation_class(kind: Any) -> Any:
    """The class that a shadow should have on a CPU for a module of class `kind` without parameters: `kind` itself, or
    for an activation of transformers' one by :func:`by_registers`."""
    return type(f"Exact{kind.__name__}", (ByRegisters, kind), {}) if kind in _ACTIVATIONS else kind
