"""Computes attention of prompts, steps and drafts over the ragged cache, in Triton. Import it only where Triton is
wanted.

A row's queries see columns of the cache from a first to a last one, both read from tensors: the shapes, and with
them a captured CUDA graph, are the same however long the rows are, and what lies past a row's end is never read.

One program takes a share of one row's columns (split K/V, Dao et al., "Flash-Decoding", 2023) for one K/V head and all
the queries on it; a second kernel merges the shares in a fixed order: no atomics, the same bits at every call.

How many queries share a program, and where shares begin, follows the batch, and with it the order of sums. Not so in
exact calls: one tile for every number of queries, blocks and shares at fixed columns. One piece of machine code then
serves steps, verifications and prompts, and a query's result does not depend on what else is attended. Another serves
several chains of drafts of a row, with the same blocks of positions, each key read from the column where it lies.

    heads of one K/V head x queries, folded      columns of the row, in blocks
    m = group * q + query                        . . |first ........... last| . . .
    [BLOCK_M, d]                                     | split 0 | 1 | 2 | 3  |
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import WORK_SPACE, operator


# Chosen by reasoning about bfloat16 with d = 128 on Hopper, not measured yet.
_QUERY_TILE = 128 * 128  # most folded queries times d per program; further ones read K/V again, from L2 as a rule
_BLOCK_M = 128  # most of them where d is small
_BLOCK_N = 64  # columns per step of the loop
_BLOCK_FLOAT32 = 16  # both, in float32, without tensor cores: larger ones spill registers
_TILE_BYTES = 16384  # of K or V per step: wider heads take fewer columns
_NUM_STAGES = 2
_PROGRAMS_PER_SM = 4  # that splitting aims at
_MOST_SPLITS = 128
_MERGED_AT_ONCE = 16  # splits
_INTERPRETED_SMS = 16  # where there is no device to ask
# Of exact calls. A block of 64 columns (32 KiB) takes an H100 some 2,200 cycles to bring and 300 to multiply with 32
# queries: the padding of few is hidden. More queries than 32 on a K/V head read K/V again, from L2.
_EXACT_QUERIES = 32
# More of them take less memory for the shares' results, fewer let one short row occupy more multiprocessors.
_EXACT_SHARE = 512  # columns

_LOG2E = math.log2(math.e)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _span(
    first_at: tl.tensor, last_at: tl.tensor, asked: tl.tensor, columns: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """First and last column of each query `[M]`; those that are not `asked` get the empty span (1, 0)."""
    first, last = tl.load(first_at, mask=asked, other=1), tl.load(last_at, mask=asked, other=0)
    return tl.maximum(first, 0).to(tl.int32), tl.minimum(last, columns - 1).to(tl.int32)


@triton.jit
def _share(
    begin: tl.tensor, end: tl.tensor, split: tl.tensor, splits: tl.tensor,
    PAGE: tl.constexpr, SHARE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The columns of the share `split` of a row's columns `begin..end`: first and end. A share starts with a block."""
    if PAGE or SHARE:
        begin = begin // BLOCK_N * BLOCK_N  # so that no block crosses pages, or depends on the other queries
    if SHARE:
        return tl.maximum(begin, split * SHARE), tl.minimum(end, (split + 1) * SHARE)
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    # Shares that differ by a block at most. Splits beyond the number of blocks get none.
    start = begin + split * blocks // splits * BLOCK_N
    return start, tl.minimum(end, begin + (split + 1) * blocks // splits * BLOCK_N)


@triton.jit
def _added(
    scores: tl.tensor, value: tl.tensor, maximum: tl.tensor, total: tl.tensor, partial: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The running softmax after one more block of scores `[M, N]` and values `[N, E]`: maximum and sum `[M]` of the
    weights, and weighted values `[M, E]`."""
    higher = tl.maximum(maximum, tl.max(scores, 1))  # [M]
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])  # [M, N]
    decay = tl.exp2(maximum - shift)  # [M]
    partial = tl.dot(weights.to(value.dtype), value, partial * decay[:, None], input_precision="ieee")
    return higher, total * decay + tl.sum(weights, 1), partial


@triton.jit
def _capped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """The softcap of scores with the factor 2 log2(e): tanh(s) = sign(s) (1 - t) / (1 + t) with t = exp(-2 |s|),
    without overflow."""
    power = tl.exp2(-tl.abs(scores))
    return tl.where(scores < 0, -cap, cap) * (1 - power) / (1 + power)


# Unspecialised numbers: others would be compiled anew for 1, for multiples of 16 and for the rest.
@triton.jit(
    do_not_specialize=[
        "columns", "splits", "length", "chained", "first_row", "first_step", "last_row", "last_step", "table_row",
    ]
)
def _attend(
    query_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, first_ptr: tl.tensor, last_ptr: tl.tensor,
    table_ptr: tl.tensor, moved_ptr: tl.tensor, partial_ptr: tl.tensor, maximum_ptr: tl.tensor, total_ptr: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, columns: tl.tensor, splits: tl.tensor, length: tl.tensor,
    chained: tl.tensor, query_row: tl.tensor, query_head: tl.tensor, query_step: tl.tensor, query_dim: tl.tensor,
    key_row: tl.tensor, key_head: tl.tensor, key_column: tl.tensor,
    value_row: tl.tensor, value_head: tl.tensor, value_column: tl.tensor,
    first_row: tl.tensor, first_step: tl.tensor, last_row: tl.tensor, last_step: tl.tensor, table_row: tl.tensor,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, SOFTCAP: tl.constexpr, SHARE: tl.constexpr, CHAINS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """The softmax-weighted values of one share of one row's columns, not normalised, with maximum and sum.

    Scores are in units of log2: `scale` (and `cap`, for softcap) hold the factor log2(e). With SHARE a share is so
    many columns; without, the row's blocks are divided among the splits. With CHAINS `chained` rows of queries in turn
    read one row of keys, and a key from column moved[0] on lies moved[1] columns later.
    """
    folded = GROUPS * length
    query_blocks = tl.cdiv(folded, BLOCK_M)
    row = tl.program_id(2).to(tl.int64)  # 64 bits: rows * stride passes 2**31 in a 64-row 32k cache
    head = tl.program_id(0) // query_blocks
    split = tl.program_id(1)
    m = tl.program_id(0) % query_blocks * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    n = tl.arange(0, BLOCK_N)  # [N]
    d = tl.arange(0, BLOCK_D)  # [D]
    e = tl.arange(0, BLOCK_E)  # [E]
    step = m % length
    first, last = _span(
        first_ptr + row * first_row + step * first_step, last_ptr + row * last_row + step * last_step,
        m < folded, columns,
    )  # [M] each
    seen_from = tl.min(tl.where(first <= last, first, columns), 0)
    seen_until = tl.max(tl.where(first <= last, last + 1, 0), 0)
    start, end = _share(seen_from, seen_until, split, splits, PAGE, SHARE, BLOCK_N)

    group_head = head * GROUPS + m // length  # [M]
    query_at = row * query_row + group_head * query_head + step * query_step  # [M]
    query = tl.load(
        query_ptr + query_at[:, None] + d[None, :] * query_dim,
        mask=(m < folded)[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )  # [M, D]  # fmt: skip
    key_at = key_ptr + head.to(tl.int64) * key_head + n[None, :] * key_column + d[:, None]  # [D, N]
    value_at = value_ptr + head.to(tl.int64) * value_head + n[:, None] * value_column + e[None, :]  # [N, E]

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    partial = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for at in range(start, end, BLOCK_N):
        column = at + n  # [N]
        place, offset = row, tl.full((), at, tl.int64)  # the block's row of the buffers, and its first column there
        if CHAINS:  # [N] both
            offset = column + tl.where(column < tl.load(moved_ptr + 2 * row), 0, tl.load(moved_ptr + 2 * row + 1))
            place = tl.zeros_like(offset) + row // chained
            if PAGE:
                pages = table_ptr + place * table_row + offset // PAGE
                place = tl.load(pages, mask=column < end, other=0).to(tl.int64)
                offset = offset % PAGE
            offset -= n
            key_from = key_at + (place * key_row + offset * key_column)[None, :]
            value_from = value_at + (place * value_row + offset * value_column)[:, None]
        else:
            if PAGE:
                place, offset = tl.load(table_ptr + row * table_row + at // PAGE).to(tl.int64), offset % PAGE
            key_from = key_at + (place * key_row + offset * key_column)
            value_from = value_at + (place * value_row + offset * value_column)
        # V is masked like K: a weight of 0 times a NaN that lies outside would be NaN.
        inside = (column >= seen_from) & (column < end)  # [N]
        key = tl.load(
            key_from, mask=(d < HEAD_DIM)[:, None] & inside[None, :], other=0.0,
        )  # [D, N]  # fmt: skip
        value = tl.load(
            value_from, mask=inside[:, None] & (e < VALUE_DIM)[None, :], other=0.0,
        )  # [N, E]  # fmt: skip
        scores = tl.dot(query, key, input_precision="ieee") * scale  # [M, N]
        if SOFTCAP:
            scores = _capped(scores, cap)
        seen = (column[None, :] >= first[:, None]) & (column[None, :] <= last[:, None]) & (column < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        maximum, total, partial = _added(scores, value, maximum, total, partial)

    kv_heads = tl.num_programs(0) // query_blocks
    to = ((row * kv_heads + head) * splits + split) * folded + m  # [M], in [B, kv, splits, groups * q]
    # m < folded, which the compiler does not see: kept in a register over the loop, that mask would make it spill.
    asked = m * splits < folded * splits
    tl.store(maximum_ptr + to, maximum, mask=asked)
    tl.store(total_ptr + to, total, mask=asked)
    # A query that saw nothing here, or is none, has a total of 0 (one that met NaN has not): the merge skips it.
    tl.store(
        partial_ptr + to[:, None] * VALUE_DIM + e[None, :], partial,
        mask=(total != 0)[:, None] & (e < VALUE_DIM)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "length"])
def _merge(
    partial_ptr: tl.tensor, maximum_ptr: tl.tensor, total_ptr: tl.tensor, sink_ptr: tl.tensor, out_ptr: tl.tensor,
    splits: tl.tensor, length: tl.tensor,
    GROUPS: tl.constexpr, VALUE_DIM: tl.constexpr, SINKS: tl.constexpr,
    LOG2E: tl.constexpr, ALL_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """One query of one head from its splits; out `[B, q, heads, d_v]`. AT_ONCE of them are added, and these sums in
    ascending order: splits without columns, however many a longer cache has, add zeros."""
    row = tl.program_id(2).to(tl.int64)
    kv_heads, folded = tl.num_programs(1), tl.num_programs(0)  # one axis takes more than 65,535 programs
    head, m = tl.program_id(1), tl.program_id(0)
    e = tl.arange(0, BLOCK_E)  # [E]
    base = (row * kv_heads + head) * splits * folded + m

    split = tl.arange(0, ALL_SPLITS)  # [ALL_SPLITS]
    totals = tl.load(total_ptr + base + split * folded, mask=split < splits, other=0.0)
    maxima = tl.load(maximum_ptr + base + split * folded, mask=totals != 0, other=float("-inf"))
    highest = tl.max(maxima, 0)
    group_head = head * GROUPS + m // length
    if SINKS:
        sink = tl.load(sink_ptr + group_head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    shift = tl.where(highest == float("-inf"), 0.0, highest)

    denominators = tl.zeros((AT_ONCE,), tl.float32)
    summed = tl.zeros((BLOCK_E,), tl.float32)
    for at in range(0, splits, AT_ONCE):
        some = at + tl.arange(0, AT_ONCE)  # [AT_ONCE]
        total = tl.load(total_ptr + base + some * folded, mask=some < splits, other=0.0)
        maximum = tl.load(maximum_ptr + base + some * folded, mask=total != 0, other=float("-inf"))
        partial = tl.load(
            partial_ptr + (base + some * folded)[:, None] * VALUE_DIM + e[None, :],
            mask=(total != 0)[:, None] & (e < VALUE_DIM)[None, :], other=0.0,
        )  # [AT_ONCE, E]  # fmt: skip
        weight = tl.exp2(maximum - shift)  # [AT_ONCE]
        denominators += total * weight
        summed += tl.sum(partial * weight[:, None], 0)
    denominator = tl.sum(denominators, 0)
    if SINKS:
        denominator += tl.exp2(sink - shift)
    out = summed / tl.where(denominator == 0, 1.0, denominator)  # 0 for a query that sees nothing
    heads = kv_heads * GROUPS
    to = ((row * length + m % length) * heads + group_head) * VALUE_DIM + e  # [E]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=e < VALUE_DIM)


def _shapes(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    batch, heads, length, _head_dim = query.shape
    return query.new_empty(batch, length, heads, values.shape[3])


@operator("ragged_decode_attention", _shapes)
def ragged_decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, scale: float,
    softcap: float | None = None, sinks: Tensor | None = None, table: Tensor | None = None, exact: bool = False,
    moved: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of queries over columns of their row in the cache; no gradient. It takes about :data:`WORK_SPACE`.

    A call compiles kernels for new shapes or strides: call once before capturing.

    Args:
        query: `[B, heads, q, d]` float32, bfloat16 or float16, any strides.
        keys: `[rows, kv_heads, columns, d]` of the same dtype, rows >= B, last dimension contiguous; kv_heads divides
            heads.
        values: `[rows, kv_heads, columns, d_v]`, likewise.
        first: `[B, q]` int64 or int32, first cache column that a query sees; less than 0 counts as 0.
        last: `[B, q]` likewise, the last column (inclusive); from `columns` on it counts as `columns - 1`. A query
            with first > last sees nothing: its result is 0. All columns between a row's smallest first and largest
            last are read for all its queries: NaN in a value there reaches also those that do not see it.
        scale: factor of query · key.
        softcap: scores become `tanh(score / softcap) * softcap` (Gemma 2).
        sinks: `[heads]` floating, a score per head that joins the denominator once (GPT-OSS's `s_aux`).
        table: `[B, pages]` int64 or int32, last dimension contiguous: keys and values are then pages
            `[any, kv_heads, 64, d]`, and row b's column c is column c % 64 of page `table[b, c // 64]`. The 64 may be
            any power of two from 64 on. None: row b's columns lie in row b.
        exact: the bits of a query's result depend on that query and the keys and values it sees alone.
        moved: `[B, q, 2]` int64, for several chains of drafts in a row: a query finds the keys of columns from the
            first number on as many columns later as the second says. `first` and `last` count as without.

    Returns:
        `[B, q, heads, d_v]` contiguous, in query's dtype; computed in float32.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    _check(query, keys, values, first, last, softcap, sinks, table)
    chained = query.shape[2]
    if moved is not None:  # each query is a row of its own
        query = query.transpose(1, 2).flatten(0, 1)[:, :, None]  # [B * q, heads, 1, d]
        first, last, moved = first.reshape(-1, 1), last.reshape(-1, 1), moved.flatten(0, 1)
    batch, heads, length, head_dim = query.shape
    kv_heads, columns, value_dim = values.shape[1:]
    page = 0
    if table is not None:
        page, columns = columns, columns * table.shape[1]
    groups = heads // kv_heads
    folded = groups * length
    out = query.new_empty(batch, length, heads, value_dim)
    if out.numel() == 0:
        return out
    tiles = _tiles(query, head_dim, value_dim, folded, exact)
    blocks = triton.cdiv(folded, tiles.block_m)
    splits = triton.cdiv(columns, _EXACT_SHARE)
    if not exact:
        programs, of_columns = batch * blocks * kv_heads, triton.cdiv(columns, tiles.block_n)
        splits = _splits(programs, of_columns, _multiprocessors(query.device))
    at_once = max(WORK_SPACE // (batch * heads * splits * (value_dim + 2) * torch.float32.itemsize), 1)  # queries
    if at_once < length:
        some = (part.split(at_once, dim) for part, dim in ((query, 2), (first, 1), (last, 1)))
        for part, (queries, begin, end) in zip(out.split(at_once, 1), zip(*some, strict=True), strict=True):
            part.copy_(ragged_decode_attention(queries, keys, values, begin, end, scale, softcap, sinks, table, exact))
        return out
    partial = query.new_empty(batch, kv_heads, splits, folded, value_dim, dtype=torch.float32)
    maximum = query.new_empty(batch, kv_heads, splits, folded, dtype=torch.float32)
    total = torch.empty_like(maximum)
    factor, cap = (scale, 0.0) if softcap is None else (2 * scale / softcap, softcap)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _attend[(kv_heads * blocks, splits, batch)](
            query, keys, values, first, last, first if table is None else table,
            first if moved is None else moved, partial, maximum, total,
            factor * _LOG2E, cap * _LOG2E, columns, splits, length,
            chained, *query.stride(), *keys.stride()[:3], *values.stride()[:3], *first.stride(), *last.stride(),
            0 if table is None else table.stride(0),
            GROUPS=groups, HEAD_DIM=head_dim, VALUE_DIM=value_dim, PAGE=page,
            SOFTCAP=softcap is not None, SHARE=_EXACT_SHARE if exact else 0, CHAINS=moved is not None,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=tiles.block_d, BLOCK_E=tiles.block_e,
            num_warps=tiles.warps, num_stages=_NUM_STAGES,
        )  # fmt: skip
        _merge[(folded, kv_heads, batch)](
            partial, maximum, total, total if sinks is None else sinks.contiguous(), out,
            splits, length,
            GROUPS=groups, VALUE_DIM=value_dim, SINKS=sinks is not None,
            LOG2E=_LOG2E, ALL_SPLITS=triton.next_power_of_2(splits), AT_ONCE=_MERGED_AT_ONCE, BLOCK_E=tiles.block_e,
            num_warps=4 if tiles.block_e > 128 else 2,
        )  # fmt: skip
    return out.view(-1, chained, heads, value_dim)


class _Tiles(NamedTuple):
    """Sizes of the blocks of one program: queries, columns, dimensions of keys and of values; and its warps."""

    block_m: int
    block_n: int
    block_d: int
    block_e: int
    warps: int


def _tiles(query: Tensor, head_dim: int, value_dim: int, folded: int, exact: bool) -> _Tiles:
    block_d, block_e = (max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))  # tl.dot: 16 at least
    widest = max(block_d, block_e)
    if query.dtype == torch.float32:
        block_m = block_n = _BLOCK_FLOAT32
    else:
        block_m = max(16, min(_QUERY_TILE // widest, _BLOCK_M, triton.next_power_of_2(folded)))
        block_m = _EXACT_QUERIES if exact else block_m
        block_n = max(16, min(_TILE_BYTES // (widest * query.element_size()), _BLOCK_N))
    is_wide = block_m > 64
    if block_m == 64 and widest >= 128:
        is_wide = not _multiplies_from_memory(query.device)
    return _Tiles(block_m, block_n, block_d, block_e, 8 if is_wide else 4)


def _splits(programs: int, blocks: int, multiprocessors: int) -> int:
    """Number of shares that the columns of a row are divided into: shapes decide, never the rows' lengths."""
    return max(1, min(_PROGRAMS_PER_SM * multiprocessors // programs, blocks, _MOST_SPLITS))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _multiplies_from_memory(device: torch.device) -> bool:
    """Whether tensor cores take their operands from shared memory. Elsewhere registers hold them, and those of four
    warps do not hold 64 queries of 128 numbers beside them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
    table: Tensor | None,
) -> None:
    batch, heads, length, head_dim = query.shape
    if query.dtype not in _DTYPES:
        raise ValueError(f"query is {query.dtype}; this kernel takes float32, bfloat16 and float16. Convert it first.")
    for name, states in (("keys", keys), ("values", values)):
        if states.dtype != query.dtype:
            raise ValueError(f"{name} are {states.dtype} and query is {query.dtype}. Convert one to the other.")
        is_short = table is None and states.shape[0] < batch
        if is_short or states.shape[1:3] != keys.shape[1:3] or heads % states.shape[1]:
            raise ValueError(
                f"{name} of shape {list(states.shape)} do not fit query {list(query.shape)} and keys "
                f"{list(keys.shape)}: they need [rows >= {batch}, kv_heads that divide {heads}, columns, d]."
            )
        if states.stride(3) != 1:
            raise ValueError(f"{name} have strides {states.stride()}: make their last dimension contiguous.")
    if keys.shape[3] != head_dim:
        raise ValueError(f"keys have head dimension {keys.shape[3]} and query has {head_dim}: they must be equal.")
    for name, bound in (("first", first), ("last", last)):
        if bound.shape != (batch, length) or bound.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{name} is {bound.dtype} of shape {list(bound.shape)}: pass int64 or int32 [{batch}, {length}], one "
                "column per query."
            )
    if table is not None:
        page = keys.shape[2]
        if len(table) != batch or table.dtype not in (torch.int64, torch.int32) or table.stride(1) != 1:
            raise ValueError(
                f"table is {table.dtype} of shape {list(table.shape)}: pass int64 or int32 [{batch}, pages], its last "
                "dimension contiguous."
            )
        if page % _BLOCK_N or page & (page - 1):
            raise ValueError(f"keys have pages of {page} columns: make them a power of two from {_BLOCK_N} on.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap} must be positive; pass None for no softcap.")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {list(sinks.shape)}: pass one score for each of the {heads} heads.")
