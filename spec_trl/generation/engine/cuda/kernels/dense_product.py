"""Multiplies dense layers and a mixture's experts, and sums rows, with the same order of summation for every number of
rows, in Triton. Import it only where Triton is wanted.

    y[row, output] = round(sum over k of x[row, k] * weight[output, k] + bias[output])

cuBLAS takes other kernels for 1, 6 and 64 rows, and adds in another order in each. Here one piece of machine code
serves every number of rows. Each program computes a tile of 64 rows x some outputs and goes over all k in ascending
order; rows past the last one are zeros, and are not stored. So a row is the same to the last bit whatever rows are
multiplied with it, in a step, a verification or a prompt. Sums are float32; float32 itself is multiplied without TF32.

Its cost, by reasoning (nothing is measured yet): a step waits for its weights: an H100 brings a tile of 128 x 64
weights in some 1,100 cycles and multiplies it with 64 rows in 260 (A100: 1,250 and 510). So the padding of few rows is
hidden, and up to 64 rows read the weights once. The cost is that k is not divided: a layer of few outputs has few
programs. Tiles are 32 outputs wide there (3,584 outputs: 112 programs); k_proj and v_proj of grouped heads keep some
16 multiprocessors busy, and may take some microseconds more than cuBLAS. Prompts are bound by the L2 cache, for
each byte of which these tiles do 21 to 43 operations: two to five times as long as cuBLAS.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import operator


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_WARPS = 4


class Tile(NamedTuple):
    """Tile of a program: rows x outputs, `inputs` at a time, with `stages` loads in flight."""

    rows: int
    outputs: int
    inputs: int
    stages: int


# By outputs of the layer, and nothing else. In half precision the stages fill 96 KiB of shared memory: the most that
# all GPUs from 8.0 on give a program, and two programs fit into a multiprocessor of an A100 or H100.
_TILES = {16384: Tile(64, 128, 64, 4), 8192: Tile(64, 64, 128, 3), 0: Tile(64, 32, 128, 4)}
# Multiplied without tensor cores: larger ones spill registers.
_TILE_FLOAT32 = Tile(16, 32, 16, 4)


def tile_for(outputs: int, dtype: torch.dtype) -> Tile:
    """The tile of a layer with so many outputs. The order of sums follows from it, so rows must not decide."""
    if dtype == torch.float32:
        return _TILE_FLOAT32
    return next(tile for least, tile in _TILES.items() if outputs >= least)


@triton.jit
def _tile(
    x_at: tl.tensor, weight_at: tl.tensor, bias_at: tl.tensor, wanted: tl.tensor, k: tl.tensor,
    inputs: tl.tensor, weight_input: tl.tensor,
    BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`[M, N]` of the rows that begin at x_at `[M, K]` and are wanted `[M, 1]`, and weights at weight_at `[K, N]`."""
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_at, mask=wanted, other=0.0)  # [M, K]
            weight = tl.load(weight_at)  # [K, N]
        else:
            inside = at + k < inputs  # [K]
            x = tl.load(x_at, mask=wanted & inside[None, :], other=0.0)
            weight = tl.load(weight_at, mask=inside[:, None], other=0.0)
        y = tl.dot(x, weight, y, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K * weight_input
    if BIAS:
        y += tl.load(bias_at).to(tl.float32)[None, :]
    return y


# `rows` is not specialised: 1, multiples of 16 and other numbers would be compiled separately.
@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor,
    rows: tl.tensor, outputs: tl.tensor, inputs: tl.tensor,
    x_row: tl.tensor, weight_output: tl.tensor, weight_input: tl.tensor,
    BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One tile; programs of the same weights follow each other, so that the later ones find them in the L2 cache."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    k = tl.arange(0, BLOCK_K)  # [K]
    stored = tl.minimum(n, outputs - 1)  # what is read past the end is not stored
    x_at = x_ptr + m[:, None] * x_row + k[None, :]  # [M, K]
    weight_at = weight_ptr + stored[None, :] * weight_output + k[:, None] * weight_input  # [K, N]
    wanted = (m < rows)[:, None]  # [M, 1]
    y = _tile(
        x_at, weight_at, bias_ptr + stored, wanted, k, inputs, weight_input, BIAS, EVEN, BLOCK_M, BLOCK_N, BLOCK_K
    )
    at = out_ptr + m[:, None] * outputs + n[None, :]  # [M, N]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=wanted & (n < outputs)[None, :])


@triton.jit
def _multiply_experts(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor,
    pair_ptr: tl.tensor, start_ptr: tl.tensor, outputs: tl.tensor, inputs: tl.tensor,
    x_row: tl.tensor, weight_expert: tl.tensor, weight_output: tl.tensor, weight_input: tl.tensor,
    SHARING: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Some outputs of one expert, of all its pairs, tile by tile: how many there are, only the device knows."""
    expert = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    k = tl.arange(0, BLOCK_K)  # [K]
    stored = tl.minimum(n, outputs - 1)
    weight_at = weight_ptr + expert * weight_expert + stored[None, :] * weight_output + k[:, None] * weight_input
    end = tl.load(start_ptr + expert + 1)
    for first in range(tl.load(start_ptr + expert), end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)  # [M]
        wanted = (m < end)[:, None]  # [M, 1]
        pair = tl.load(pair_ptr + m, mask=m < end, other=0)  # [M]
        y = _tile(
            x_ptr + (pair // SHARING)[:, None] * x_row + k[None, :], weight_at, bias_ptr + expert * outputs + stored,
            wanted, k, inputs, weight_input, BIAS, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        at = out_ptr + pair[:, None] * outputs + n[None, :]  # [M, N]
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=wanted & (n < outputs)[None, :])


@triton.jit
def _sum(x_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One row."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_ptr + row * SIZE + d, mask=d < SIZE, other=0.0)
    tl.store(out_ptr + row, tl.sum(x.to(tl.float32), 0))


def _shapes(x: Tensor, weight: Tensor, _bias: object = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@operator("dense_product", _shapes)
def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times weight, plus bias: the bits of a row depend on that row, weight and bias alone. No gradient.

    A call compiles a kernel for new shapes or strides of a layer: call once before capturing.

    Args:
        x: `[..., in]` float32, bfloat16 or float16, any strides.
        weight: `[out, in]` of the same dtype, any strides: it is read as it lies.
        bias: `[out]` contiguous, likewise; None: no bias.

    Returns:
        `[..., out]` contiguous, in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    outputs, inputs = weight.shape
    fits = x.shape[-1] == inputs and (bias is None or (bias.shape == (outputs,) and bias.is_contiguous()))
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if not fits or len(dtypes) > 1 or x.dtype not in DTYPES:
        shapes = [list(tensor.shape) for tensor in (x, weight, bias) if tensor is not None]
        raise ValueError(
            f"x, weight and bias are {dtypes} of shapes {shapes}: pass [..., in], [out, in] and [out] of one dtype, "
            f"among {DTYPES}."
        )
    out = x.new_empty(*x.shape[:-1], outputs)
    rows = x.reshape(-1, inputs)  # [m, in]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if out.numel() == 0:
        return out
    tile = tile_for(outputs, x.dtype)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _multiply[(triton.cdiv(len(rows), tile.rows), triton.cdiv(outputs, tile.outputs))](
            rows, weight, weight if bias is None else bias, out, len(rows), outputs, inputs,
            rows.stride(0), *weight.stride(),
            BIAS=bias is not None, EVEN=inputs % tile.inputs == 0,
            BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
            num_warps=_NUM_WARPS, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _expert_shapes(x: Tensor, weight: Tensor, _bias: object, pairs: Tensor, *_: object) -> Tensor:
    return x.new_empty(len(pairs), weight.shape[1])


@operator("expert_product", _expert_shapes)
def expert_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Tensor, starts: Tensor, sharing: int
) -> Tensor:
    """Products of pairs of a row and an expert: the bits of a pair depend on its row and its expert alone. No
    gradient; the host does not wait for the device.

    Args:
        x: `[n, in]` contiguous, of the dtypes of :func:`dense_product`.
        weight: `[experts, out, in]` of the same dtype, any strides.
        bias: `[experts, out]` contiguous, likewise; None: no bias.
        pairs: `[p]` int64, pairs in the order of their experts; pair i has row i // `sharing`, p = n * `sharing`.
        starts: `[experts + 1]` int64, where each expert's pairs begin in `pairs`, and the last one's end.

    Returns:
        `[p, out]` in the order of i; zeros for pairs of no expert.
    """
    experts, outputs, inputs = weight.shape
    out = x.new_zeros(len(pairs), outputs)
    if out.numel() == 0:
        return out
    tile = tile_for(outputs, x.dtype)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _multiply_experts[(experts, triton.cdiv(outputs, tile.outputs))](
            x, weight, weight if bias is None else bias, out, pairs, starts, outputs, inputs,
            x.stride(0), *weight.stride(),
            SHARING=sharing, BIAS=bias is not None, EVEN=inputs % tile.inputs == 0,
            BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
            num_warps=_NUM_WARPS, num_stages=tile.stages,
        )  # fmt: skip
    return out


@operator("row_sum", lambda x: x.new_empty(x.shape[:-1], dtype=torch.float32))
def row_sum(x: Tensor) -> Tensor:
    """x `[..., n]` of the dtypes of :func:`dense_product`, summed over its last dimension, as `[...]` float32: the
    bits of a row depend on that row alone. No gradient."""
    size, rows = x.shape[-1], x.contiguous()
    out = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return out.zero_()
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _sum[(out.numel(),)](rows, out, SIZE=size, BLOCK=block, num_warps=min(max(block // 256, 1), 16))
    return out
