"""Attention over a ragged cache on a CPU: compiled C++, where there is a compiler.

It reads each row's own columns, and no mask, so a row's output does not depend on the other rows or on how far columns
are padded. It is compiled once per element type and head size, in about a second (`native_code.py`).
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...native_code import compiler, load


_SCALARS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16", torch.float16: "_Float16"}
_SOURCE = Path(__file__).with_suffix(".cpp")
_Numbers = ctypes.c_int64 * 12  # struct Sizes


def runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention of queries in `dtype` can take spans (:meth:`MaskPlan.spans`) for masks on `device`."""
    return device.type == "cpu" and dtype in _SCALARS and compiler() is not None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Queries `[B, heads, q, d]` over `[B, kv_heads, columns, d]` → `[B, q, heads, d]`; None where it does not serve
    these. Sums are in float32, of float64 in float64.

    Args:
        query, key, value: in one dtype: bfloat16, float16, float32 or float64. Values may have another `d`.
        spans: `[B, 1, q, 2]` int64, first and last column of each query; or `[B, 1, q, 4]`: from the column in the
            third place on, columns lie as many further as the fourth says (:meth:`MaskPlan.spans`).
        scale: of the scores.
        softcap: scores become `tanh(score / softcap) * softcap`.
        sinks: `[heads]`, a score per head that joins the denominator.
    """
    head_size, value_size = max(query.shape[3], value.shape[3]), value.shape[3]
    function = compiled(query.dtype, head_size) if query.dtype == key.dtype == value.dtype else None
    if function is None:
        return None
    # Heads of two sizes are filled with zeros. Such K/V is computed for each call (DeepSeek), which takes longer.
    query, key, value = (
        each if each.shape[3] == head_size else F.pad(each, (0, head_size - each.shape[3]))
        for each in (query, key, value)
    )
    if key.stride() != value.stride() or key.stride(3) != 1:
        key, value = key.contiguous(), value.contiguous()
    if query.stride(3) != 1:
        query = query.contiguous()
    batch, heads, count, _ = query.shape
    kv_heads = key.shape[1]
    output, spans = query.new_empty(batch, count, heads, head_size), spans.contiguous()
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(query.dtype, torch.float32)).contiguous()  # [heads]
    sizes = _Numbers(
        batch, kv_heads, heads // kv_heads, count, *query.stride()[:3], *key.stride()[:3], spans.shape[3],
        torch.get_num_threads(),
    )  # fmt: skip
    given = (None if tensor is None else tensor.data_ptr() for tensor in (query, key, value, spans, sinks, output))
    function(*given, sizes, scale, softcap or 0.0)
    return output[..., :value_size].contiguous()


@functools.cache
def compiled(dtype: torch.dtype, head_size: int) -> Callable[..., None] | None:
    """The function for these; None where it cannot be compiled."""
    scalar = _SCALARS.get(dtype)
    library = None if scalar is None else load(_SOURCE, reorders_sums=False, SCALAR=scalar, HEAD_SIZE=head_size)
    if library is None:
        return None
    library.attend.argtypes = [ctypes.c_void_p] * 6 + [_Numbers, ctypes.c_double, ctypes.c_double]
    library.attend.restype = None
    return library.attend
