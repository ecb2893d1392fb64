"""Products in C++: right, and an element the same bits whatever the number of rows and threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spec_trl.native import cpu_products
from spec_trl.native.native_code import compiler
from spec_trl.quantization.kernels import LayerSpec
from spec_trl.quantization.kernels.native import NativeInt4, NativeInt8
from spec_trl.quantization.kernels.reference import ReferenceInt4, ReferenceInt8
from spec_trl.quantization.rtn import RoundToNearest


pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
# Outputs that no block divides, inputs that no register does, a single output, and more than one block of outputs.
DENSE = [(50, 172), (7, 64), (1, 9), (961, 576)]
QUANTIZED = [(50, 192, 64), (1, 64, 64), (961, 576, 64), (70, 1536, 128)]  # the last is the group
EIGHT_BITS = [(50, 172, None), (1, 12, None), (961, 576, None)]
Products = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Ours, and the same in double precision."""


def dense(out: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Products]:
    weight, bias = torch.randn(out, size, dtype=dtype), torch.randn(out, dtype=dtype)
    x = torch.randn(70, size, dtype=dtype)
    return x, lambda x: (
        cpu_products.multiply_matrix(cpu_products.dense_matrix(weight, bias), x),
        x.double() @ weight.double().T + bias,
    )


def quantized(out: int, size: int, group: int | None) -> tuple[Tensor, Products]:
    bits, kinds = (4, (NativeInt4, ReferenceInt4)) if group else (8, (NativeInt8, ReferenceInt8))
    layer = LayerSpec(out, size, bits, group or size, torch.float32, None, torch.device("cpu"))
    weight, bias, x = torch.randn(out, size), torch.randn(out), torch.randn(70, size)
    packed, exact = (kind(layer) for kind in kinds)
    for each in (packed, exact):
        RoundToNearest().quantize_(weight, each)
    values = exact.dequantize().double()
    return x, lambda x: (cpu_products.multiply_matrix(packed.matrix(bias), x), x.double() @ values.T + bias)


@pytest.mark.instructions
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float32) for shape in (*DENSE, *QUANTIZED, *EIGHT_BITS)]
    + [(shape, dtype) for shape in DENSE for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, products = dense(*shape, dtype) if len(shape) == 2 else quantized(*shape)
    threads = torch.get_num_threads()
    whole, exact = products(x)
    of_y = {torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2e-3}[dtype]
    rounding = of_y if shape in DENSE else 0.025  # of x, to 7 bits
    assert (whole.double() - exact).norm() < rounding * exact.norm()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(products(x)[0], whole)
            for rows in (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65):
                assert torch.equal(products(x[3 : 3 + rows])[0], whole[3 : 3 + rows]), rows
    finally:
        torch.set_num_threads(threads)
    wide = torch.stack([x, x], dim=1)[:, 0]  # rows do not follow each other
    assert torch.equal(products(wide)[0], whole)


@pytest.mark.instructions
@pytest.mark.parametrize("dtype", cpu_products.DTYPES, ids=str)
def test_a_library_for_one_dtype_has_the_bits_of_the_one_for_all(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    every = cpu_products.library(None, dtype)
    for shape in DENSE:
        x, products = dense(*shape, dtype)
        alone = [products(x[:rows])[0] for rows in (1, 5, 16, 70)]
        with monkeypatch.context() as patch:
            patch.setattr(cpu_products, "library", lambda *_: every)
            assert all(map(torch.equal, alone, [products(x[:rows])[0] for rows in (1, 5, 16, 70)]))


@pytest.mark.parametrize("dtype", cpu_products.DTYPES, ids=str)
def test_weights_at_an_odd_address(dtype: torch.dtype) -> None:
    """A file may map them so."""
    weight, x = torch.randn(50, 172).to(dtype), torch.randn(9, 172).to(dtype)
    memory = bytearray(1) + bytearray(weight.view(torch.uint8).numpy().tobytes())
    odd = torch.frombuffer(memory, dtype=dtype, offset=1).view(50, 172)
    assert odd.data_ptr() % 2 == 1
    by_address = [cpu_products.multiply_matrix(cpu_products.dense_matrix(each, None), x) for each in (weight, odd)]
    assert torch.equal(*by_address)
