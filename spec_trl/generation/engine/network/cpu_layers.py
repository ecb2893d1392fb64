"""Parts of decoder layers on a CPU in C++, if there is a compiler: attention, and the operations between products.

Attention reads the columns of a row, without a mask, so a row's output does not depend on other rows or on padding of
columns. It is compiled once per element type and head size, in about a second (`native_code.py`).

The operations between matrix products replace some thirty small torch calls. They have the arguments of those in
`kernels/fused_layer.py`, in float32 and bfloat16. Whole layers are one call: `one_call.py`.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ....native import cpu_products
from ....native.native_code import SOURCES, failed, load, load_ahead, untraced
from ..kv.cache import autocast_dtype


SCALARS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16", torch.float16: "_Float16"}
_ATTENTION, _LAYER = SOURCES / "cpu_attention.cpp", SOURCES / "cpu_layer.cpp"
_Numbers = ctypes.c_int64 * 12  # struct Sizes


@untraced
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Queries `[B, heads, q, d]` over `[B, kv_heads, columns, d]` → `[B, q, heads, d]`; None if it does not serve
    these. Sums are in float32, for float64 in float64.

    Args:
        query, key, value: in one dtype: bfloat16, float16, float32 or float64. Values may have another `d`.
        spans: `[B, 1, q, 2]` int64, first and last column of each query; or `[B, 1, q, 3]`: third, the row of K/V;
            or `[B, 1, q, 4]`: third, the column from
            which columns are shifted, fourth, the shift (:meth:`MaskPlan.spans`).
        scale: of the scores.
        softcap: scores become `tanh(score / softcap) * softcap`.
        sinks: `[heads]`, a score per head that joins the denominator.
    """
    head_size, value_size = max(query.shape[3], value.shape[3]), value.shape[3]
    function = attention_function(query.dtype, head_size) if query.dtype == key.dtype == value.dtype else None
    if function is None:
        return None
    # Heads of two sizes are padded with zeros. Such K/V is computed in every call (DeepSeek), which takes longer.
    query, key, value = (
        states if states.shape[3] == head_size else F.pad(states, (0, head_size - states.shape[3]))
        for states in (query, key, value)
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
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (query, key, value, spans, sinks, output)]
    function(*pointers, sizes, scale, softcap or 0.0)
    return output[..., :value_size].contiguous()


def compile_ahead(network: PreTrainedModel) -> None:
    """Begins to compile the libraries that forwards of `network` on a CPU will most likely call, all at once."""
    sizes = (getattr(module, "head_dim", None) for module in network.modules())
    head_size = next((size for size in sizes if isinstance(size, int)), None)
    if network.device.type == "cpu" and network.dtype in SCALARS and head_size is not None:
        _compile_ahead(autocast_dtype(network.device) or network.dtype, network.dtype, head_size)


@functools.cache
def _compile_ahead(dtype: torch.dtype, wide: torch.dtype, head_size: int) -> None:
    scalar = SCALARS[dtype]
    if (dtype, wide) in _DTYPES:
        load_ahead(cpu_products.SOURCE, **cpu_products.macros(cpu_products.DTYPES[dtype], dtype))  # takes longest
        load_ahead(_LAYER, SCALAR=scalar, WIDE=SCALARS[wide])
    load_ahead(_ATTENTION, SCALAR=scalar, HEAD_SIZE=head_size)
    load_ahead(SOURCES / "cpu_sampling.cpp")


@functools.cache
def attention_function(dtype: torch.dtype, head_size: int, in_team: bool = False) -> Callable[..., None] | None:
    """The C++ function for these, or the one that all threads of a team call; None if it cannot be compiled."""
    scalar = SCALARS.get(dtype)
    library = None if scalar is None else load(_ATTENTION, SCALAR=scalar, HEAD_SIZE=head_size)
    if library is None:
        return None
    function = library.attend_in_team if in_team else library.attend
    function.argtypes = [ctypes.c_void_p] * 6 + [_Numbers, ctypes.c_double, ctypes.c_double]
    function.restype = None
    return function


def attention_failed() -> bool:
    """Whether the C++ of attention could not be compiled, as far as is known."""
    return any(library.source.endswith(_ATTENTION.name) for library in failed)


_PER_THREAD = 1 << 12  # elements: with fewer, a second thread saves less than waking it takes

_Heads = ctypes.c_int64 * 31  # struct Heads
_Strides = ctypes.c_int64 * 2


def serves(x: Tensor) -> bool:
    """Whether the functions take `x`: float32 or bfloat16, in inference mode (in forwards of the compiled runner), and
    under no autocast to another dtype. In float64 the norms of families still compute in float32, and would round
    differently here."""
    return computes(x) and autocast_dtype(x.device) in (None, x.dtype)


def computes(hidden_states: Tensor) -> bool:
    """Whether :class:`~.OneCall` takes them: like :func:`serves`, or float32 under autocast to bfloat16."""
    dtype = autocast_dtype(hidden_states.device) or hidden_states.dtype
    fits = (dtype, hidden_states.dtype) in _DTYPES and hidden_states.device.type == "cpu"
    return fits and torch.is_inference_mode_enabled() and library(dtype, hidden_states.dtype) is not None


_DTYPES = {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)}
"""Of products, and of the residual stream."""


class Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double), ("shift", ctypes.c_double)]


def norm_of(weight: Tensor | None, eps: float, shift: float | None) -> Norm:
    return Norm(None if weight is None else weight.data_ptr(), eps, -1.0 if shift is None else shift)


@untraced
def rms_norm(x: Tensor, weight: Tensor, eps: float, _dtype: None = None, shift: float | None = None) -> Tensor:
    """`[..., hidden]` contiguous, normed over its last dimension and times `weight` `[hidden]`."""
    out, size, norm = torch.empty_like(x), x.shape[-1], norm_of(weight, eps, shift)
    pointers = x.data_ptr(), None, None, None, norm, out.data_ptr()
    library(x.dtype).rms_norm(*pointers, x.numel() // size, size, _threads(out))
    return out


@untraced
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    _dtype: None = None,
    shift: float | None = None,
    branch_weight: Tensor | None = None,
    branch_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """x + residual, both `[..., hidden]` contiguous, and :func:`rms_norm` of that. With a `branch_weight` `[hidden]` x
    is normed before, by a norm of the same `shift`."""
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    branch = None if branch_weight is None else norm_of(branch_weight, branch_eps, shift)
    pointers = x.data_ptr(), branch, residual.data_ptr(), total.data_ptr(), norm_of(weight, eps, shift), out.data_ptr()
    library(x.dtype).rms_norm(*pointers, x.numel() // size, size, _threads(out))
    return total, out


@untraced
def norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float | None) -> Tensor:
    """residual + :func:`rms_norm` of x, both `[..., hidden]` contiguous."""
    total, size = torch.empty_like(x), x.shape[-1]
    pointers = x.data_ptr(), norm_of(weight, eps, shift), residual.data_ptr(), total.data_ptr(), None, None
    library(x.dtype).rms_norm(*pointers, x.numel() // size, size, _threads(total))
    return total


def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both `[..., n]` with any stride of rows, as `[..., n]` contiguous."""
    return _gate_multiply(gate, up, is_gelu=False)


def gelu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """The same with GELU, approximated by tanh."""
    return _gate_multiply(gate, up, is_gelu=True)


@untraced
def _gate_multiply(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    size = gate.shape[-1]
    gate, up = gate.reshape(-1, size), up.reshape(-1, size)
    strides = _Strides(gate.stride(0), up.stride(0))
    pointers = gate.data_ptr(), up.data_ptr(), out.data_ptr()
    library(gate.dtype).gate_multiply(*pointers, len(gate), size, strides, is_gelu, _threads(out))
    return out


@untraced
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
    shift: float | None,
    half: int,
) -> Tensor:
    """Rotates the first 2 * half elements of queries and keys by their positions, and writes keys and values into a
    layer's cache: see :func:`~.rotate_and_write`."""
    batch, length, heads, head_dim = query.shape
    out = query.new_empty(batch, heads, length, head_dim)
    sizes = _Heads(
        batch, length, heads, key.shape[2], head_dim, half,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *cos.stride()[:2], *sin.stride()[:2], *to_rows.stride(), *to_columns.stride(),
        *keys.stride()[:3], *values.stride()[:3], _threads(out), cos.dtype == torch.float32,
    )  # fmt: skip
    tensors = query, key, value, cos, sin, keys, values, to_rows, to_columns
    norms = norm_of(query_weight, eps, shift), norm_of(key_weight, eps, shift)
    function = library(query.dtype).rotate_and_write
    function(*(tensor.data_ptr() for tensor in tensors), *norms, out.data_ptr(), sizes)
    return out


def _threads(out: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + out.numel() // _PER_THREAD)


@functools.cache
def library(dtype: torch.dtype, wide: torch.dtype | None = None) -> Any:
    """The functions compiled for `dtype`, with a residual stream in `wide`, by default the same; None without a
    compiler."""
    functions = load(_LAYER, SCALAR=SCALARS[dtype], WIDE=SCALARS[wide or dtype])
    if functions is not None:
        pointer, integer, norm = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(Norm)
        functions.decoder_layers.argtypes = [pointer, integer, *[pointer] * 6]
        functions.rms_norm.argtypes = [pointer, norm, pointer, pointer, norm, pointer, *[integer] * 3]
        functions.gate_multiply.argtypes = [pointer] * 3 + [integer, integer, _Strides, integer, integer]
        functions.rotate_and_write.argtypes = [pointer] * 9 + [norm, norm, pointer, _Heads]
        for name in ("rms_norm", "gate_multiply", "rotate_and_write", "decoder_layers"):
            getattr(functions, name).restype = None
    return functions
