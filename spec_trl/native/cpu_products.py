"""Multiplies matrices on a CPU, over dense, 8-bit or 4-bit weights, in C++. Results for a token do not depend on the
forward's other tokens.

Drafting and verifying multiply one to a few dozen rows, for which reading the weights takes the time. An element of a
product is summed in the same order for any number of rows (`cpu_products.cpp`). A warning names a 16-bit dtype that is
slower than float32.
"""

import ctypes
import functools
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .native_code import load, untraced


CODE_BLOCK = 64
"""Inputs whose 4-bit codes lie in one block; they divide the inputs of a quantized matrix."""
MOST_ROWS = 32
"""Most rows at which a 4-bit weight takes no longer than the dense one, in bfloat16 (benchmarks/dense_linear.py)."""
DTYPES = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}
"""Dtypes of x, y and dense weights, and their bits."""
SOURCE = Path(__file__).with_suffix(".cpp")


class Matrix(ctypes.Structure):
    """`struct Matrix` of `cpu_products.cpp`: pointers, and sizes."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("weights", "scales", "zeros", "bias")] + [
        (name, ctypes.c_int64) for name in ("out", "in_", "bits", "group", "is_transposed")
    ]


def is_readable(tensor: Tensor) -> bool:
    """Whether C++ can read `tensor`: contiguous numbers of one of `DTYPES` on the CPU, and no subclass, whose numbers
    may be elsewhere."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype in DTYPES
        and tensor.is_contiguous()
    )


def dense_matrix(weight: Tensor, bias: Tensor | None) -> Matrix:
    """A view of `weight` [out, in], contiguous or a transposed contiguous one, and `bias` [out], of one of `DTYPES`.
    Both must outlive the view."""
    pointers = weight.data_ptr(), None, None, None if bias is None else bias.data_ptr()
    return Matrix(*pointers, *weight.shape, DTYPES[weight.dtype], 0, not weight.is_contiguous())


class _Phase(threading.local):
    reads_prompts = False


_phase = _Phase()


@contextmanager
def reading_prompts() -> Iterator[None]:
    """Makes :func:`serves` False for float32 within the block, in this thread: oneDNN multiplies many rows (prompts)
    faster. Steps never compute tokens of a prompt: its sums may have another order."""
    before, _phase.reads_prompts = _phase.reads_prompts, True
    try:
        yield
    finally:
        _phase.reads_prompts = before


def serves(dtype: torch.dtype) -> bool:
    """Whether products in `dtype` are served on this machine, in this phase."""
    return library(DTYPES[dtype], dtype) is not None and (not _phase.reads_prompts or dtype != torch.float32)


@untraced
def multiply_matrix(matrix: Matrix, x: Tensor) -> Tensor:
    """x [..., in] on the CPU, of one of `DTYPES`, that of a dense matrix → [..., out] of its dtype."""
    out, size = int(matrix.out), int(matrix.in_)
    rows = x.reshape(-1, size)  # [m, in]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    y = x.new_empty(*x.shape[:-1], out)  # [..., out]
    threads, is_narrow = torch.get_num_threads(), x.dtype != torch.float32
    multiply = library(int(matrix.bits), x.dtype).multiply
    multiply(matrix, 1, rows.data_ptr(), rows.stride(0), len(rows), y.data_ptr(), out, threads, is_narrow)
    return y


def macros(bits: int | None, dtype: torch.dtype) -> dict[str, int]:
    """Of :func:`library`."""
    return ({} if bits is None else {"ONLY": bits}) | ({"HALVES": 1} if dtype == torch.float16 else {})


def address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def library(bits: int | None, dtype: torch.dtype) -> Any:
    """The compiled functions for weights of `bits`, or for all, and x in `dtype`; None without a compiler."""
    functions = load(SOURCE, **macros(bits, dtype))
    if functions is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        x_and_y = pointer, integer, integer, pointer, integer
        functions.multiply.argtypes = [ctypes.POINTER(Matrix), integer, *x_and_y, integer, integer]
        functions.multiply.restype = None
    return functions


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_BY_ONEDNN = {
    torch.float32: True,
    torch.bfloat16: HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),  # fewer CPUs multiply it
}
# torch computes functions of single numbers in registers; other code computes the last numbers of a thread's share,
# too few for a register, and rounds sigmoid, SiLU, tanh-GELU and softplus otherwise.
_NUMBERS = 64  # per step of torch's loops, in 16 bits; half as many in float32, a quarter without AVX-512
_SHARE = 32768  # numbers per thread of torch (at::internal::GRAIN_SIZE)


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


@untraced
def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times `weight` [out, in] → [..., out] in its dtype, if :func:`is_plain`: generated tokens in
    C++, prompts by oneDNN on the weights as they are.

    oneDNN sums one row in another order than several (all alike): one row is multiplied as two. oneDNN is called
    directly, since torch has other code for small products.
    """
    x = x.to(weight.dtype)
    if serves(x.dtype):
        return multiply_matrix(dense_matrix(weight, bias), x)
    rows = x.reshape(-1, x.shape[-1])  # [m, in]
    pair = rows.expand(2, -1).contiguous() if len(rows) == 1 else rows  # [max(m, 2), in]
    is_served = HAS_ONEDNN and _BY_ONEDNN[x.dtype]
    y = (multiply_by_onednn if is_served else F.linear)(pair, weight, bias)
    return y[: len(rows)].view(*x.shape[:-1], len(weight))


def is_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False) -> bool:
    """Whether :func:`multiply` computes the product: without gradient, of numbers that C++ can read:
    x [..., in], `weight` [..., out, in] or transposed, bias [..., out]. Autocast may cast x."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return (
        is_readable(weight)
        and (bias is None or (is_readable(bias) and bias.dtype == weight.dtype))
        and weight.dtype == (autocast or x.dtype)
        and x.dtype in DTYPES
        and x.device.type == "cpu"
        and x.shape[-1] == weight.shape[-2 if transposed else -1]
        and x.numel() > 0
        and not torch.is_grad_enabled()  # these have no backward pass
    )


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [m, in] times weight [out, in] → [m, out], as Inductor calls it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


ROWS = 64  # of x, as in a short prefill or a verification
OUTPUTS = 512  # of the layer: enough to occupy a CPU, and a few milliseconds without instructions
MIN_WEIGHTS = 1 << 18  # of the layer: with fewer, the time of the call itself dominates
MIN_GAIN = 1.2  # least speedup that is worth reloading a model


seen: set[str] = set()


def first_time(subject: str) -> bool:
    """Whether `subject`, which a process says or measures once, is new; from then on it is not."""
    is_new = subject not in seen
    seen.add(subject)
    return is_new


def warn_of_slow_dtype(model: PreTrainedModel) -> None:
    """Warns, once per dtype and process, if `model` is on a CPU without instructions for its 16-bit dtype, and one of
    its layers is faster in float32."""
    dtype = model.dtype
    if model.device.type != "cpu" or has_instructions(dtype):
        return
    layers = (module for module in model.modules() if type(module) is nn.Linear)
    weight = next((layer.weight for layer in layers if layer.weight.numel() >= MIN_WEIGHTS), None)  # [out, in]
    if weight is None or not first_time(f"products in {dtype}"):
        return
    gain = float32_gain(weight.detach()[:OUTPUTS])
    if gain >= MIN_GAIN:
        warnings.warn(
            f"this CPU has no instructions for {dtype}: a product of {ROWS} rows with a layer of the model takes "
            f"{gain:.1f} times as long as in float32, measured now. Load the model with dtype=torch.float32 if its "
            "memory allows.",
            stacklevel=2,
        )


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether torch reports instructions of the CPU that multiply in `dtype`; True for float32 and wider."""
    if dtype == torch.bfloat16 and platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def float32_gain(weight: Tensor) -> float:
    """Speedup of float32 for a product with `weight` [out, in]."""
    x = torch.ones(ROWS, weight.shape[1], dtype=weight.dtype)  # [m, in]; no random numbers: they are the caller's
    wide_x, wide = x.float(), weight.float()  # [m, in], [out, in]
    multiply_wide = partial(multiply_by_onednn, bias=None) if HAS_ONEDNN else F.linear
    return seconds(lambda: F.linear(x, weight)) / seconds(lambda: multiply_wide(wide_x, wide))


@torch.no_grad()
def seconds(multiply: Callable[[], Tensor]) -> float:
    """Seconds of the fastest of three calls, after one that warms up."""
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        multiply()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
