"""Matrix products of a few rows in float32 on a CPU, over float32, 8-bit or 4-bit weights: C++, if it compiles.

Drafting and verifying multiply one to a few dozen rows, for which reading the weights takes the time. An element of a
product is summed in the same order whatever the number of rows (`cpu_products.cpp`).
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .native_code import load


CODE_BLOCK = 64
"""Inputs whose 4-bit codes lie in one block; they divide the inputs of a quantized matrix."""
MOST_ROWS = 16
"""Rows up to which the product takes no longer than oneDNN's, but for a few shapes (benchmarks/dense_linear.py)."""


class Matrix(ctypes.Structure):
    """`struct Matrix` of `cpu_products.cpp`: pointers, and sizes."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("weights", "scales", "zeros", "bias")] + [
        (name, ctypes.c_int64) for name in ("out", "in_", "bits", "group")
    ]


def dense_matrix(weight: Tensor, bias: Tensor | None) -> Matrix:
    """A view of `weight` [out, in] and `bias` [out], float32 and contiguous, which must outlive it."""
    return Matrix(weight.data_ptr(), None, None, None if bias is None else bias.data_ptr(), *weight.shape, 32, 0)


def serves(rows: int) -> bool:
    """Whether products of so many rows are served on this machine."""
    return rows <= MOST_ROWS and library() is not None


def multiply(matrix: Matrix, x: Tensor) -> Tensor:
    """x [..., in] float32 on the CPU → [..., out]."""
    out, size = int(matrix.out), int(matrix.in_)
    rows = x.reshape(-1, size)  # [m, in]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    y = x.new_empty(*x.shape[:-1], out)  # [..., out]
    threads = torch.get_num_threads()
    library().multiply(matrix, 1, rows.data_ptr(), rows.stride(0), len(rows), y.data_ptr(), out, threads)
    return y


def address(function: Any) -> int:
    """Where a compiled function lies, for C++ that calls it."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def library() -> Any:
    """The compiled functions; None where nothing compiles them."""
    found = load(Path(__file__).with_suffix(".cpp"), reorders_sums=False)
    if found is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        given = pointer, integer, integer, pointer, integer, integer
        found.multiply.argtypes = [ctypes.POINTER(Matrix), integer, *given]
        found.multiply.restype = None
    return found
