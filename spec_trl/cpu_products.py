"""Matrix products of few rows on a CPU, over dense, 8-bit or 4-bit weights: C++, if it compiles.

Drafting and verifying multiply one to a few dozen rows, for which reading the weights takes the time. An element of a
product is summed in the same order whatever the number of rows (`cpu_products.cpp`).
"""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .native_code import load


CODE_BLOCK = 64
"""Inputs whose 4-bit codes lie in one block; they divide the inputs of a quantized matrix."""
MOST_ROWS = 16
"""Rows up to which a packed weight takes no longer than oneDNN over the dense one, but for a few shapes
(benchmarks/dense_linear.py)."""
DTYPES = {torch.float32: 32, torch.bfloat16: 16}
"""Dtypes of x, y and dense weights, and their bits."""


class Matrix(ctypes.Structure):
    """`struct Matrix` of `cpu_products.cpp`: pointers, and sizes."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("weights", "scales", "zeros", "bias")] + [
        (name, ctypes.c_int64) for name in ("out", "in_", "bits", "group", "is_transposed")
    ]


def is_plain(tensor: Tensor) -> bool:
    """Whether C++ can read `tensor`: numbers of one of `DTYPES` next to each other on the CPU, and no subclass, which
    may keep them elsewhere."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype in DTYPES
        and tensor.is_contiguous()
    )


def dense_matrix(weight: Tensor, bias: Tensor | None) -> Matrix:
    """A view of `weight` [out, in], contiguous or a transposed contiguous one, and `bias` [out], of one of `DTYPES`,
    which must outlive it."""
    pointers = weight.data_ptr(), None, None, None if bias is None else bias.data_ptr()
    return Matrix(*pointers, *weight.shape, DTYPES[weight.dtype], 0, not weight.is_contiguous())


class _Phase(threading.local):
    reads_prompts = False


_phase = _Phase()


@contextmanager
def reading_prompts() -> Iterator[None]:
    """Within it, in this thread, :func:`serves` is False, but in bfloat16 on AMX: prompts have many rows, for which
    torch's products are faster. Steps never compute tokens of a prompt, so that its sums may have another order."""
    before, _phase.reads_prompts = _phase.reads_prompts, True
    try:
        yield
    finally:
        _phase.reads_prompts = before


def serves(dtype: torch.dtype) -> bool:
    """Whether products in `dtype` are served on this machine, in this phase."""
    functions = library()
    return functions is not None and (
        not _phase.reads_prompts or (dtype == torch.bfloat16 and functions.tiles_run() == 1)
    )


def multiply(matrix: Matrix, x: Tensor) -> Tensor:
    """x [..., in] on the CPU, float32, or of the dtype of a dense matrix → [..., out] of its dtype."""
    out, size = int(matrix.out), int(matrix.in_)
    rows = x.reshape(-1, size)  # [m, in]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    y = x.new_empty(*x.shape[:-1], out)  # [..., out]
    threads, is_narrow = torch.get_num_threads(), x.dtype != torch.float32
    library().multiply(
        matrix, 1, rows.data_ptr(), rows.stride(0), len(rows), y.data_ptr(), out, threads, is_narrow
    )
    return y


def address(function: Any) -> int:
    """Address of a compiled function, for C++ that calls it."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def library() -> Any:
    """The compiled functions; None where nothing compiles them."""
    functions = load(Path(__file__).with_suffix(".cpp"), reorders_sums=False)
    if functions is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        x_and_y = pointer, integer, integer, pointer, integer
        functions.multiply.argtypes = [ctypes.POINTER(Matrix), integer, *x_and_y, integer, integer]
        functions.multiply.restype = None
    return functions
