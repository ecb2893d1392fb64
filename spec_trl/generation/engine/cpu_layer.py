"""What a decoder layer does between its matrix products, on a CPU: C++ in the place of some thirty small operations,
each of which costs its call. The functions are those of `kernels/fused_layer.py`, with the same arguments."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...native_code import load


_PER_THREAD = 1 << 15  # elements: with fewer, a second thread saves less than waking it takes

_Heads = ctypes.c_int64 * 29  # struct Heads
_Strides = ctypes.c_int64 * 2


def serves(x: Tensor) -> bool:
    """Whether the functions take `x`: float32, in inference mode, in forwards of the compiled runner that is, and not
    under autocast. float64 is for exactness: families' norms compute in float32 all the same, and would round
    differently here."""
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return fits and torch.is_inference_mode_enabled() and library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`[..., hidden]` contiguous, normed over its last dimension and times `weight` `[hidden]`."""
    out = torch.empty_like(x)
    _norm(x, None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, both `[..., hidden]` contiguous, and :func:`rms_norm` of that."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    _norm(x, residual, weight, total, out, eps)
    return total, out


def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of `[..., n]` each, rows any stride apart, as `[..., n]` contiguous."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    size = gate.shape[-1]
    gate, up = gate.reshape(-1, size), up.reshape(-1, size)
    strides = _Strides(gate.stride(0), up.stride(0))
    pointers = gate.data_ptr(), up.data_ptr(), out.data_ptr()
    library().silu_multiply(*pointers, len(gate), size, strides, _threads(out))
    return out


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    to_rows: Tensor,
    to_columns: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Rotates queries and keys by their positions, and writes keys and values into a layer's cache: see
    :func:`~spec_trl.generation.engine.kernels.fused_layer.rotate_and_write`."""
    batch, length, heads, head_dim = query.shape
    out = query.new_empty(batch, heads, length, head_dim)
    sizes = _Heads(
        batch, length, heads, key.shape[2], head_dim, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *cos.stride()[:2], *sin.stride()[:2], *to_rows.stride(), *to_columns.stride(),
        *keys.stride()[:3], *values.stride()[:3], _threads(out),
    )  # fmt: skip
    tensors = query, key, value, cos, sin, keys, values, to_rows, to_columns
    weights = (None if weight is None else weight.data_ptr() for weight in (query_weight, key_weight))
    function = library().rotate_and_write
    function(*(tensor.data_ptr() for tensor in tensors), *weights, out.data_ptr(), sizes, eps)
    return out


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    size = x.shape[-1]
    pointers = (None if each is None else each.data_ptr() for each in (x, residual, weight, total, out))
    library().rms_norm(*pointers, x.numel() // size, size, eps, _threads(out))


def _threads(out: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + out.numel() // _PER_THREAD)


@functools.cache
def library() -> Any:
    """The compiled functions; None where nothing compiles them."""
    found = load(Path(__file__).with_suffix(".cpp"))
    if found is not None:
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        found.decoder_layer.argtypes = [pointer, pointer]
        found.rms_norm.argtypes = [pointer] * 5 + [integer, integer, real, integer]
        found.silu_multiply.argtypes = [pointer] * 3 + [integer, integer, _Strides, integer]
        found.rotate_and_write.argtypes = [pointer] * 12 + [_Heads, real]
        for function in (found.rms_norm, found.silu_multiply, found.rotate_and_write, found.decoder_layer):
            function.restype = None
    return found
