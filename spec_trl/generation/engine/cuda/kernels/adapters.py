"""Adds LoRA adapters to the products of their layers, in Triton. Importing this file imports Triton.

    out[row, n] = y[row, n] + scaling * sum over r of b[n, r] * (sum over k of a[r, k] * x[row, k])

PEFT launches four kernels per layer: two products, scaling, addition. Here one kernel serves up to three layers with
one input. Each of its programs computes the sums over k anew for its outputs: a is small and lies in the L2 cache.
Where that is too much to read (many rows, or many inputs), a kernel before it computes the sums once, divided over k.
For gate and up of an MLP the kernel multiplies too: silu(gate) * up.

Sums are float32. They are rounded to the dtype in which PEFT computes (that of the adapter, or autocast's) and to the
dtype of y wherever PEFT's forward rounds: so results are PEFT's, the order of sums apart. The order may depend on the
number of rows.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import T, operator
from .fused_layer import _rounded_product


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOST_LAYERS = 3
MOST_RANK = 64
# By reasoning, not measured yet. A program that reads half a MiB of 16 bits from the L2 cache takes some 5 us, about
# two launches.
_MOST_NUMBERS = 1 << 18
_SPLIT = 1024  # inputs of a program that computes a part of the sums over k


@triton.jit
def _times_a(
    x_ptr: tl.tensor, a_ptr: tl.tensor, m: tl.tensor, rows: tl.tensor, begin: tl.tensor, end: tl.tensor,
    INPUTS: tl.constexpr, RANK: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """x times a over the inputs from `begin` to `end` → `[M, R]` float32."""
    r = tl.minimum(tl.arange(0, BLOCK_R), RANK - 1)  # [R]; past the last one b is 0
    k = tl.arange(0, BLOCK_K)  # [K]
    wanted = (m < rows)[:, None]  # [M, 1]
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for at in range(begin, end, BLOCK_K):
        x_at = x_ptr + m[:, None] * INPUTS + (at + k)[None, :]  # [M, K]
        a_at = a_ptr + r[None, :] * INPUTS + (at + k)[:, None]  # [K, R]
        if INPUTS % BLOCK_K == 0:
            x, a = tl.load(x_at, mask=wanted, other=0.0), tl.load(a_at)
        else:
            inside = at + k < end  # [K]
            x = tl.load(x_at, mask=wanted & inside, other=0.0)
            a = tl.load(a_at, mask=inside[:, None], other=0.0)
        total = tl.dot(x.to(DTYPE), a.to(DTYPE), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _shrink(
    x_ptr: tl.tensor, first_a: tl.tensor, second_a: tl.tensor, third_a: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor,
    INPUTS: tl.constexpr, RANK: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Writes one layer's sums over `SPLIT` inputs."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    split, layer = tl.program_id(1), tl.program_id(2)
    a_ptr = first_a
    if layer == 1:
        a_ptr = second_a
    if layer == 2:
        a_ptr = third_a
    end = tl.minimum((split + 1) * SPLIT, INPUTS)
    part = _times_a(x_ptr, a_ptr, m, rows, split * SPLIT, end, INPUTS, RANK, DTYPE, BLOCK_M, BLOCK_R, BLOCK_K)
    place = (layer * tl.num_programs(1) + split).to(tl.int64) * rows + m  # [M]
    at = out_ptr + place[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    tl.store(at, part, mask=(m < rows)[:, None])


@triton.jit
def _adapted(
    x_ptr: tl.tensor, y_ptr: tl.tensor, a_ptr: tl.tensor, b_ptr: tl.tensor, parts_ptr: tl.tensor, scaling: tl.tensor,
    outputs: tl.tensor, m: tl.tensor, n: tl.tensor, rows: tl.tensor,
    INPUTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile of y plus one adapter, `[M, N]` in the dtype of y."""
    r = tl.arange(0, BLOCK_R)  # [R]
    if SPLITS:
        low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in range(SPLITS):
            at = parts_ptr + (split * rows + m)[:, None] * BLOCK_R + r[None, :]
            low += tl.load(at, mask=(m < rows)[:, None], other=0.0)
    else:
        low = _times_a(x_ptr, a_ptr, m, rows, 0, INPUTS, INPUTS, RANK, DTYPE, BLOCK_M, BLOCK_R, BLOCK_K)
    at = b_ptr + n[None, :] * RANK + r[:, None]
    b = tl.load(at, mask=(n < outputs)[None, :] & (r < RANK)[:, None], other=0.0)  # [R, N]
    added = tl.dot(low.to(DTYPE), b.to(DTYPE), input_precision="ieee").to(DTYPE)  # [M, N]
    added = (added.to(tl.float32) * scaling).to(DTYPE)
    at = y_ptr + m[:, None] * outputs + n[None, :]
    y = tl.load(at, mask=(m < rows)[:, None] & (n < outputs)[None, :], other=0.0)
    return (y.to(tl.float32) + added.to(tl.float32)).to(y.dtype)


@triton.jit(do_not_specialize=["rows"])
def _add(
    x_ptr: tl.tensor, y_ptr: tl.tensor, second_y: tl.tensor, third_y: tl.tensor,
    a_ptr: tl.tensor, second_a: tl.tensor, third_a: tl.tensor,
    b_ptr: tl.tensor, second_b: tl.tensor, third_b: tl.tensor, parts_ptr: tl.tensor, out_ptr: tl.tensor,
    scaling: tl.tensor, second_scaling: tl.tensor, third_scaling: tl.tensor,
    outputs: tl.tensor, second_outputs: tl.tensor, third_outputs: tl.tensor, out_row: tl.tensor, rows: tl.tensor,
    LAYERS: tl.constexpr, GATED: tl.constexpr,
    INPUTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of one layer, or with GATED of the product of two. Outputs of the layers lie side by side."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    tile, begin = tl.program_id(1), 0
    next_part = SPLITS * rows.to(tl.int64) * BLOCK_R
    if LAYERS > 1 and not GATED:
        tiles = tl.cdiv(outputs, BLOCK_N)
        if tile >= tiles:
            tile -= tiles
            begin += outputs
            y_ptr, a_ptr, b_ptr, scaling, outputs = second_y, second_a, second_b, second_scaling, second_outputs
            parts_ptr += next_part
            if LAYERS > 2:
                tiles = tl.cdiv(outputs, BLOCK_N)
                if tile >= tiles:
                    tile -= tiles
                    begin += outputs
                    y_ptr, a_ptr, b_ptr, scaling, outputs = third_y, third_a, third_b, third_scaling, third_outputs
                    parts_ptr += next_part
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    out = _adapted(
        x_ptr, y_ptr, a_ptr, b_ptr, parts_ptr, scaling, outputs, m, n, rows,
        INPUTS, RANK, SPLITS, DTYPE, BLOCK_M, BLOCK_R, BLOCK_K,
    )  # fmt: skip
    if GATED:
        up = _adapted(
            x_ptr, second_y, second_a, second_b, parts_ptr + next_part, second_scaling, outputs, m, n, rows,
            INPUTS, RANK, SPLITS, DTYPE, BLOCK_M, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        gate = out.to(tl.float32)
        out = _rounded_product((gate / (1 + tl.exp(-gate))).to(up.dtype), up, tl.float32)
    at = out_ptr + m[:, None] * out_row + begin + n[None, :]
    tl.store(at, out, mask=(m < rows)[:, None] & (n < outputs)[None, :])


def _parts_of(x: Tensor, a: Sequence[Tensor], _dtype: object) -> Tensor:
    splits = triton.cdiv(x.shape[-1], _SPLIT)
    return x.new_empty(len(a), splits, x.numel() // x.shape[-1], _block_of(a), dtype=torch.float32)


def _side_by_side(
    _x: object, ys: Sequence[Tensor], _a: object, _b: object, _scalings: object, _dtype: object, _parts: object,
    gated: bool = False,
) -> Tensor:  # fmt: skip
    size = ys[0].shape[-1] if gated else sum(y.shape[-1] for y in ys)
    return ys[0].new_empty(*ys[0].shape[:-1], size)


@operator("lora_sums", _parts_of)
def lora_sums(x: Tensor, a: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Sums over inputs for :func:`add_lora`, in parts: `[layers, splits, rows, R]` float32; the same arguments."""
    parts = _parts_of(x, a, dtype)
    rows, inputs = parts.shape[2], x.shape[-1]
    tile, warps = _tile(rows, dtype)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _shrink[(triton.cdiv(rows, tile), parts.shape[1], len(a))](
            x, *_filled(a), parts, rows,
            INPUTS=inputs, RANK=len(a[0]), SPLIT=_SPLIT, DTYPE=DTYPES[dtype],
            BLOCK_M=tile, BLOCK_R=parts.shape[3], BLOCK_K=_inputs(tile, dtype), num_warps=warps,
        )  # fmt: skip
    return parts


@operator("lora_add", _side_by_side)
def lora_add(
    x: Tensor,
    ys: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
    dtype: torch.dtype,
    parts: Tensor | None,
    gated: bool = False,
) -> Tensor:
    """:func:`add_lora` of tensors that fit; `parts`: of :func:`lora_sums`; None: the kernel computes these sums."""
    out = _side_by_side(x, ys, a, b, scalings, dtype, parts, gated)
    rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
    tile, warps = _tile(rows, dtype)
    sizes = [y.shape[-1] for y in ys]
    wide = dtype == torch.float32
    # Others put some bytes on the stack.
    outputs = 64 if wide and (_block_of(a) > 32 or (gated and ys[0].dtype == dtype)) else 128
    tiles = sum(triton.cdiv(size, outputs) for size in (sizes[:1] if gated else sizes))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _add[(triton.cdiv(rows, tile), tiles)](
            x, *_filled(ys), *_filled(a), *_filled(b), x if parts is None else parts, out,
            *_filled(scalings), *_filled(sizes), out.shape[-1], rows,
            LAYERS=len(ys), GATED=gated, INPUTS=inputs, RANK=len(a[0]), SPLITS=0 if parts is None else parts.shape[1],
            DTYPE=DTYPES[dtype], BLOCK_M=tile, BLOCK_N=outputs, BLOCK_R=_block_of(a),
            BLOCK_K=_inputs(tile, dtype), num_warps=warps,
        )  # fmt: skip
    return out


def add_lora(
    x: Tensor,
    ys: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scalings: Sequence[float],
    dtype: torch.dtype,
    gated: bool = False,
) -> Tensor:
    """The outputs of up to three layers of one input, with their adapters, side by side.

    Args:
        x: `[..., in]` contiguous, of :data:`DTYPES`, as all that follow.
        ys: per layer `[..., out]` contiguous, of one dtype, without the adapter.
        a, b: per layer `[rank, in]` and `[out, rank]` contiguous, all of one rank.
        scalings: per layer, of the adapter.
        dtype: of the adapters' arithmetic.
        gated: returns silu(gate) * up for the two layers gate and up, of equally many outputs.

    Returns:
        `[..., out of all]`, or with `gated` `[..., out]`, contiguous, in the dtype of `ys`.

    Raises:
        ValueError: the tensors do not fit together.
    """
    rank, inputs = a[0].shape
    fits = len(a) == len(b) == len(ys) == len(scalings) <= (2 if gated else MOST_LAYERS) and rank <= MOST_RANK
    fits = fits and (not gated or len(ys) == 2 and ys[0].shape == ys[1].shape) and x.shape[-1] == inputs
    for y, low, high in zip(ys, a, b, strict=True):
        fits = fits and y.shape[:-1] == x.shape[:-1] and low.shape == a[0].shape and high.shape == (y.shape[-1], rank)
    tensors = x, *ys, *a, *b
    one_dtype = all(len({each.dtype for each in group}) == 1 for group in (ys, a, b))
    if not (fits and one_dtype and all(each.is_contiguous() and each.dtype in DTYPES for each in tensors)):
        shapes = [f"{list(each.shape)} {each.dtype}" for each in tensors]
        raise ValueError(
            f"x, outputs and adapters do not fit together: {', '.join(shapes)}. Pass the shapes and dtypes that the "
            f"function names, contiguous, of a rank up to {MOST_RANK}."
        )
    rows = x.numel() // inputs
    parts = lora_sums(x, a, dtype) if (rows + _block_of(a)) * inputs > _MOST_NUMBERS else None
    return lora_add(x, ys, a, b, scalings, dtype, parts, gated)


def _filled(group: Sequence[T]) -> list[T]:
    return [*group, *[group[-1]] * (MOST_LAYERS - len(group))]


def _block_of(a: Sequence[Tensor]) -> int:
    return max(16, triton.next_power_of_2(len(a[0])))


def _tile(rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a program, and its warps. float32 is multiplied without tensor cores: large tiles would spill."""
    few, many = (4, 16) if dtype == torch.float32 else (16, 64)
    return (few, 4) if rows <= few else (many, 8)


def _inputs(tile: int, dtype: torch.dtype) -> int:
    return 64 if tile == 64 or dtype == torch.float32 else 128
