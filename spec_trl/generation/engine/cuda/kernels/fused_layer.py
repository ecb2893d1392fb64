"""Computes a decoder layer's operations between its matrix products, in Triton. Importing this file imports Triton.

A small operation on a GPU takes the time of its launch. An eager layer has some thirty of them; here they are five:

    norm | q, k, v | rotate, write | attention | o | add, norm | gate, up | silu, multiply | down | add

Norms differ between families (`shift`). None, as in Llama: the normed row is rounded, then multiplied with the weights
and rounded again. A number, 1 in Gemma and 0 in GPT-OSS: the row is multiplied with the sum of weights and number in
float32, then rounded.

Every kernel computes in float32 (float64 for float64) and rounds to the dtype of the activations wherever the modules
of transformers do, so in half precision too the results are those of the modules, sums in another order apart. That
includes float32 weights under autocast: norms, rotation and the residual stream are float32 there, products are not.
A program has one row of a norm, one head of a token, or elements: no bit depends on how many rows there are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import operator


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Chosen by reasoning, not measured yet: 8 elements per thread, but at least one warp.
_ELEMENTS_PER_WARP = 256
_MOST_WARPS = 16
_GATED_BLOCK = 1024
# The modules' products are rounded before they are added.
_OPTIONS = dict(enable_fp_fusion=False)


@triton.jit
def _rounded_product(x: tl.tensor, y: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """x * y, rounded to the dtype of y, x's or a wider one."""
    return (x.to(WIDE) * y.to(WIDE)).to(y.dtype)


@triton.jit
def _weighted(
    normed: tl.tensor, weight_ptr: tl.tensor, at: tl.tensor, x: tl.tensor,
    SIZE: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Elements `at` of a row that is normed in float32, times their weights, rounded as norms of x are."""
    weight = tl.load(weight_ptr + at, mask=at < SIZE, other=0.0)
    if SHIFT is None:
        product = _rounded_product(normed.to(x.dtype), weight, WIDE)
    elif SHIFT == 0:
        product = (normed.to(WIDE) * weight.to(WIDE)).to(x.dtype)
    else:
        product = (normed * (weight.to(tl.float32) + SHIFT)).to(x.dtype)
    return product


@triton.jit
def _normed_row(
    x: tl.tensor, weight_ptr: tl.tensor, d: tl.tensor, eps: tl.tensor,
    SIZE: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    wide = x.to(tl.float32)  # whatever WIDE is: so do the modules
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    return _weighted(normed, weight_ptr, d, x, SIZE, SHIFT, WIDE)


@triton.jit
def _rms_norm(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, branch_ptr: tl.tensor, weight_ptr: tl.tensor, sum_ptr: tl.tensor,
    out_ptr: tl.tensor, branch_eps: tl.tensor, eps: tl.tensor,
    SIZE: tl.constexpr, BRANCH: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, SHIFT: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row, x: normed with BRANCH; with ADDS the residual is added and the sum, in its dtype, is stored; normed
    with NORMS."""
    d = tl.arange(0, BLOCK)  # [BLOCK]
    at = tl.program_id(0).to(tl.int64) * SIZE + d
    x = tl.load(x_ptr + at, mask=d < SIZE, other=0.0)
    if BRANCH:
        x = _normed_row(x, branch_ptr, d, branch_eps, SIZE, SHIFT, WIDE)
    if ADDS:
        residual = tl.load(residual_ptr + at, mask=d < SIZE, other=0.0)
        x = (x.to(WIDE) + residual.to(WIDE)).to(residual.dtype)
        tl.store(sum_ptr + at, x, mask=d < SIZE)
    if NORMS:
        tl.store(out_ptr + at, _normed_row(x, weight_ptr, d, eps, SIZE, SHIFT, WIDE), mask=d < SIZE)


@triton.jit
def _gated(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, out_ptr: tl.tensor, gate_row: tl.tensor, up_row: tl.tensor,
    SIZE: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    gate = tl.load(gate_ptr + row * gate_row + d, mask=d < SIZE, other=0.0)
    up = tl.load(up_ptr + row * up_row + d, mask=d < SIZE, other=0.0)
    wide = gate.to(WIDE)
    if KIND == "gelu":  # of tanh
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)  # sqrt(2 / pi)
        activated = wide / (1 + tl.exp(-2 * inner))  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))
    elif KIND == "silu":
        activated = wide / (1 + tl.exp(-wide))
    else:
        activated = 1 / (1 + tl.exp(-wide))
    tl.store(out_ptr + row * SIZE + d, _rounded_product(activated.to(gate.dtype), up, WIDE), mask=d < SIZE)


@triton.jit
def _cache_offset(
    row: tl.tensor, head: tl.tensor, column: tl.tensor,
    row_stride: tl.tensor, head_stride: tl.tensor, column_stride: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Offset of a head's states of a row's column in a buffer of the cache: the only code here that knows the
    layout."""
    return row * row_stride + head * head_stride + column * column_stride


@triton.jit
def _rotate(
    from_ptr: tl.tensor, to_ptr: tl.tensor, weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    eps: tl.tensor, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ANGLES: tl.constexpr, NORM: tl.constexpr,
    SHIFT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one token: normed with NORM, then its first 2 * HALF elements rotated by the token's position."""
    d = tl.arange(0, BLOCK)  # [BLOCK]
    low = tl.load(from_ptr + d, mask=d < HALF, other=0.0)
    high = tl.load(from_ptr + HALF + d, mask=d < HALF, other=0.0)
    after = 2 * HALF + tl.arange(0, BLOCK_REST)  # [BLOCK_REST], what is not rotated
    if 2 * HALF < HEAD_DIM:
        rest = tl.load(from_ptr + after, mask=after < HEAD_DIM, other=0.0)
    if NORM:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        total = tl.sum(wide_low * wide_low + wide_high * wide_high, 0)
        if 2 * HALF < HEAD_DIM:
            wide_rest = rest.to(tl.float32)
            total += tl.sum(wide_rest * wide_rest, 0)
        factor = tl.rsqrt(total / HEAD_DIM + eps)
        if 2 * HALF < HEAD_DIM:
            rest = _weighted(wide_rest * factor, weight_ptr, after, rest, HEAD_DIM, SHIFT, WIDE)
        low = _weighted(wide_low * factor, weight_ptr, d, low, HALF, SHIFT, WIDE)
        high = _weighted(wide_high * factor, weight_ptr + HALF, d, high, HALF, SHIFT, WIDE)
    low_cos = tl.load(cos_ptr + d, mask=d < HALF, other=0.0)
    low_sin = tl.load(sin_ptr + d, mask=d < HALF, other=0.0)
    high_cos = tl.load(cos_ptr + ANGLES - HALF + d, mask=d < HALF, other=0.0)
    high_sin = tl.load(sin_ptr + ANGLES - HALF + d, mask=d < HALF, other=0.0)
    low_kept, high_kept = _rounded_product(low, low_cos, WIDE), _rounded_product(high, high_cos, WIDE)
    low_turned, high_turned = _rounded_product(high, low_sin, WIDE), _rounded_product(low, high_sin, WIDE)
    tl.store(to_ptr + d, (low_kept.to(WIDE) - low_turned.to(WIDE)).to(low_kept.dtype), mask=d < HALF)
    tl.store(to_ptr + HALF + d, (high_kept.to(WIDE) + high_turned.to(WIDE)).to(low_kept.dtype), mask=d < HALF)
    if 2 * HALF < HEAD_DIM:
        tl.store(to_ptr + after, rest, mask=after < HEAD_DIM)


@triton.jit(do_not_specialize=["length"])
def _rotate_and_write(
    query_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    query_weight_ptr: tl.tensor, key_weight_ptr: tl.tensor, eps: tl.tensor,
    to_row_ptr: tl.tensor, to_column_ptr: tl.tensor, out_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor,
    length: tl.tensor,
    query_row: tl.tensor, query_step: tl.tensor, query_head: tl.tensor,
    key_row: tl.tensor, key_step: tl.tensor, key_head: tl.tensor,
    value_row: tl.tensor, value_step: tl.tensor, value_head: tl.tensor,
    cos_row: tl.tensor, cos_step: tl.tensor, sin_row: tl.tensor, sin_step: tl.tensor,
    to_row_row: tl.tensor, to_row_step: tl.tensor, to_column_row: tl.tensor, to_column_step: tl.tensor,
    keys_row: tl.tensor, keys_head: tl.tensor, keys_column: tl.tensor,
    values_row: tl.tensor, values_head: tl.tensor, values_column: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ANGLES: tl.constexpr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_VALUE: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one token: a query's goes to out `[B, heads, q, d]`, a key's and a value's to the cache."""
    row = (tl.program_id(0) // length).to(tl.int64)
    step = (tl.program_id(0) % length).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    cos_ptr += row * cos_row + step * cos_step
    sin_ptr += row * sin_row + step * sin_step
    to_row = tl.load(to_row_ptr + row * to_row_row + step * to_row_step).to(tl.int64)
    column = tl.load(to_column_ptr + row * to_column_row + step * to_column_step).to(tl.int64)
    if head < HEADS:
        query_at = query_ptr + row * query_row + step * query_step + head * query_head
        to = out_ptr + ((row * HEADS + head) * length + step) * HEAD_DIM
        _rotate(
            query_at, to, query_weight_ptr, cos_ptr, sin_ptr, eps,
            HEAD_DIM, HALF, ANGLES, NORM, SHIFT, WIDE, BLOCK, BLOCK_REST,
        )  # fmt: skip
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        key_at = key_ptr + row * key_row + step * key_step + head * key_head
        to = keys_ptr + _cache_offset(to_row, head, column, keys_row, keys_head, keys_column)
        _rotate(
            key_at, to, key_weight_ptr, cos_ptr, sin_ptr, eps,
            HEAD_DIM, HALF, ANGLES, NORM, SHIFT, WIDE, BLOCK, BLOCK_REST,
        )  # fmt: skip
    else:
        head -= HEADS + KV_HEADS
        d = tl.arange(0, BLOCK_VALUE)  # [BLOCK_VALUE]
        value_at = value_ptr + row * value_row + step * value_step + head * value_head + d
        value_to = values_ptr + _cache_offset(to_row, head, column, values_row, values_head, values_column)
        tl.store(value_to + d, tl.load(value_at, mask=d < HEAD_DIM), mask=d < HEAD_DIM)


def _normed(
    x: Tensor, _weight: object, _eps: object, dtype: torch.dtype | None = None, _shift: object = None
) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _added_and_normed(
    _x: object, residual: Tensor, _weight: object, _eps: object, dtype: torch.dtype | None = None, *_: object
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual, dtype=dtype)


def _second(_x: object, residual: Tensor, *_: object) -> Tensor:
    return torch.empty_like(residual)


def _same(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _query_first(query: Tensor, *_: object) -> Tensor:
    batch, length, heads, head_dim = query.shape
    return query.new_empty(batch, heads, length, head_dim)


@operator("rms_norm", _normed)
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None, shift: float | None = None
) -> Tensor:
    """`[..., hidden]` contiguous, normed over its last dimension and times `weight` `[hidden]` of its dtype; rounded
    to `dtype` in the end, where one is given. `shift`: see above."""
    out = torch.empty_like(x, dtype=dtype)
    _norm(x, None, None, weight, None, out, 0.0, eps, shift)
    return out


@operator("add_rms_norm", _added_and_normed)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    shift: float | None = None,
    branch_weight: Tensor | None = None,
    branch_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """x + residual, both `[..., hidden]` contiguous, in the dtype of `residual`, x's or float32; and
    :func:`rms_norm` of that. With a `branch_weight` x is normed before, by a norm of the same `shift`."""
    total, out = torch.empty_like(residual), torch.empty_like(residual, dtype=dtype)
    _norm(x, residual, branch_weight, weight, total, out, branch_eps, eps, shift)
    return total, out


@operator("norm_add", _second)
def norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float | None = None) -> Tensor:
    """The :func:`rms_norm` of x plus `residual`, shapes and dtypes as in :func:`add_rms_norm`."""
    total = torch.empty_like(residual)
    _norm(x, residual, weight, None, total, None, eps, 0.0, shift)
    return total


@operator("silu_multiply", _same)
def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both `[..., n]` with any stride of rows, as `[..., n]` contiguous."""
    return _multiply(gate, up, "silu")


@operator("gelu_multiply", _same)
def gelu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """The same for the GELU by tanh."""
    return _multiply(gate, up, "gelu")


@operator("sigmoid_multiply", _same)
def sigmoid_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """The same for the sigmoid."""
    return _multiply(gate, up, "sigmoid")


def _multiply(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    size = gate.shape[-1]
    gate, up = gate.reshape(-1, size), up.reshape(-1, size)
    _check("gate and up", gate.dtype, gate.stride(1) == up.stride(1) == 1 and gate.shape == up.shape, up)
    if gate.numel():
        block = min(_GATED_BLOCK, triton.next_power_of_2(size))
        with torch.cuda.device_of(gate):  # Triton launches on the current device
            _gated[(len(gate), triton.cdiv(size, block))](
                gate, up, out, gate.stride(0), up.stride(0),
                SIZE=size, KIND=kind, WIDE=_wide(gate), BLOCK=block, **_OPTIONS,
            )  # fmt: skip
    return out


@operator("rotate_and_write", _query_first, writes=("keys", "values"))
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
    shift: float | None = None,
    half: int | None = None,
) -> Tensor:
    """Rotates queries and keys by their positions, and writes keys and values into a layer's cache.

    Args:
        query: `[B, q, heads, d]`, the last dimension contiguous, as all that follow.
        key, value: `[B, q, kv_heads, d]`, of the dtype of `query`, as the cache.
        cos, sin: `[B, q, 2 * half]`, or `[B, q, half]` if both halves are alike; of that dtype or float32, as the
            weights of norms.
        keys, values: `[rows, kv_heads, columns, d]`, the cache's buffers.
        to_rows, to_columns: `[B, q]` int64, the row and the column of the buffers that each token is written to; they
            must lie within them.
        query_weight, key_weight: `[d]`, of norms before the rotation; None: no norms.
        eps, shift: of the norms.
        half: half of the number of a head's rotated first elements; None: of all.

    Returns:
        The rotated queries `[B, heads, q, d]`, contiguous.
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    weights = [] if query_weight is None or key_weight is None else [query_weight, key_weight]
    narrow, wide = (key, value, keys, values), (cos, sin, *weights)
    half = head_dim // 2 if half is None else half
    fits = (
        key.shape == value.shape == (batch, length, kv_heads, head_dim)
        and cos.shape == sin.shape == (batch, length, cos.shape[-1])
        and cos.shape[-1] in (half, 2 * half)
        and all(weight.shape == (head_dim,) for weight in weights)
        and keys.shape[1::2] == values.shape[1::2] == (kv_heads, head_dim)
        and to_rows.shape == to_columns.shape == (batch, length)
        and all(tensor.stride(-1) == 1 for tensor in (query, *narrow, *wide))
    )
    names = "query, key, value, cos, sin, cache, places and norms"
    _check(names, query.dtype, fits, *narrow)
    _check(names, cos.dtype, _goes_with(query, cos), *wide)
    out = query.new_empty(batch, heads, length, head_dim)
    if out.numel():
        with torch.cuda.device_of(query):  # Triton launches on the current device
            _rotate_and_write[(batch * length, heads + 2 * kv_heads)](
                query, key, value, cos, sin, *(weights or (query, query)), eps, to_rows, to_columns, out, keys, values,
                length, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
                *cos.stride()[:2], *sin.stride()[:2], *to_rows.stride(), *to_columns.stride(),
                *keys.stride()[:3], *values.stride()[:3],
                HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=half, ANGLES=cos.shape[-1],
                NORM=bool(weights), SHIFT=shift, WIDE=_wide(query), BLOCK=triton.next_power_of_2(half),
                BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
                BLOCK_VALUE=triton.next_power_of_2(head_dim), num_warps=1, **_OPTIONS,
            )  # fmt: skip
    return out


def _norm(
    x: Tensor,
    residual: Tensor | None,
    branch_weight: Tensor | None,
    weight: Tensor | None,
    total: Tensor | None,
    out: Tensor | None,
    branch_eps: float,
    eps: float,
    shift: float | None,
) -> None:
    size = x.shape[-1]
    wide = x if residual is None else residual
    weights = [each for each in (branch_weight, weight) if each is not None]
    fits = all(tensor.shape == x.shape and tensor.is_contiguous() for tensor in (x, wide))
    fits = fits and all(each.shape == (size,) for each in weights) and _goes_with(x, wide)
    _check("x, residual and weight", wide.dtype, fits, *weights)
    if x.numel() == 0:
        return
    block = triton.next_power_of_2(size)
    absent = weights[0]  # any tensor
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _rms_norm[(x.numel() // size,)](
            x, wide, *(absent if each is None else each for each in (branch_weight, weight, total, out)),
            branch_eps, eps,
            SIZE=size, BRANCH=branch_weight is not None, ADDS=residual is not None, NORMS=weight is not None,
            SHIFT=shift, WIDE=_wide(x), BLOCK=block,
            num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MOST_WARPS), **_OPTIONS,
        )  # fmt: skip


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _goes_with(x: Tensor, wide: Tensor) -> bool:
    """Whether `wide` has the dtype of x, or float32 beside autocast's narrow x."""
    return wide.dtype == x.dtype or (wide.dtype == torch.float32 and x.dtype.itemsize == 2)


def _check(names: str, dtype: torch.dtype, fits: bool, *others: Tensor) -> None:
    dtypes = {dtype, *(other.dtype for other in others)}
    if len(dtypes) > 1 or dtype not in DTYPES or not fits:
        raise ValueError(
            f"{names} do not fit together, or are of {dtypes}: pass the shapes, strides and dtypes that the function "
            f"names, of {DTYPES}."
        )
