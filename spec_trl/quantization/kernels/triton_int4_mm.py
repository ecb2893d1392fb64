"""Computes y = x Wᵀ for few rows of x and a 4-bit W, in Triton. Importing this file imports triton.

A nibble becomes a number by OR-ing it into the bits of 128 in bfloat16, which makes 128 + code exactly; adding
-(128 + zero), one instruction for two weights and exact as well, leaves code - zero for the tensor cores. The scale
multiplies a group's product, in fp32. W is the left operand: its unpacked weights stay in registers, and x is padded
to 8 or 16 rows only.

Where W has too few tiles for the device, the columns of a tile are divided among programs, and the last of them to
arrive adds the parts in a fixed order: one kernel, and the same bits at every call. A counter per tile shows the
last program, which sets it to 0 again for the next call or replay.
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor


# By reasoning, and by the instructions, registers and spills of the code compiled for Hopper; not measured yet.
BLOCK_N = 128  # rows of W per program
MAX_BLOCK_M = 32  # rows of x per program; for more, W is read again, from the L2 cache where it fits
NUM_WARPS, NUM_STAGES = 4, 4
STAGES_MEMORY = 128 * 1024  # bytes of shared memory per multiprocessor that two programs with NUM_STAGES need
FEW_ROWS = 8  # of x per program; then a program takes 64 KiB, and three of them fit into
THREE_PROGRAMS_MEMORY = 200 * 1024  # bytes of shared memory per multiprocessor
PART = 0.25  # what it takes to store and add one part of a tile, in the time of one span
INTERPRETED_SMS = 132  # multiprocessors, where there is no device to ask


def _assembly(nibble: int) -> str:
    """PTX from two words ($1, $2) and their rows' parameters ($3, $4) to a register ($0) with two (code - zero)."""
    return f"""{{
        .reg .b32 codes, offset, one;
        prmt.b32 codes, $1, $2, {"0x5410" if nibble < 4 else "0x7632"};
        shr.u32 codes, codes, {4 * (nibble % 4)};
        lop3.b32 codes, codes, 0x000f000f, 0x43004300, 0xea;
        prmt.b32 offset, $3, $4, 0x5410;
        mov.b32 one, 0x3f803f80;
        fma.rn.bf16x2 $0, codes, one, offset;
        }}"""


ASSEMBLY = tl.constexpr(tuple(map(_assembly, range(8))))


@triton.jit
def _steps(words, parameters, NIBBLE: tl.constexpr, INTERPRETED: tl.constexpr):
    """code - zero of one nibble of each word, [BLOCK_N, WORDS]; parameters [BLOCK_N, 1].

    Triton's interpreter knows neither assembly nor arithmetic in bfloat16, so there it is float32.
    """
    if INTERPRETED:
        codes = (((words >> (4 * NIBBLE)) & 0xF) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        offset = parameters.to(tl.int16).to(tl.bfloat16, bitcast=True)
        steps = codes.to(tl.float32) + offset.to(tl.float32)
    else:
        lines: tl.constexpr = ASSEMBLY[NIBBLE]
        pairs = tl.inline_asm_elementwise(
            lines, "=r,r,r,r,r", [words, parameters], dtype=tl.int16, is_pure=True, pack=2
        )
        steps = pairs.to(tl.bfloat16, bitcast=True)
    return steps


@triton.jit(do_not_specialize=["m", "spans", "spans_per_split"])  # or more numbers would mean more compilations
def _int4_mm(
    x_ptr, words_ptr, parameters_ptr, out_ptr, parts_ptr, arrivals_ptr, m, n, k, stored_n, spans, spans_per_split,
    row_stride, group_stride,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_K: tl.constexpr,
    DIVIDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_N, BLOCK_M] tile of W xᵀ over a share of the spans; out [m, n]. Where these are several shares,
    DIVIDED, each is written to parts [splits, m, n] and counted in arrivals [blocks of m, tiles of n]."""
    SPAN: tl.constexpr = 8 * WORDS
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N], of W
    split = tl.program_id(1)
    column = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M], row of x
    stored_row = tl.minimum(row, stored_n - 1)  # what is read past the end is not stored
    j = tl.arange(0, WORDS)  # [WORDS]
    word_ptrs = words_ptr + ((stored_row // 16 * spans * 16 + stored_row % 16) * WORDS)[:, None] + j[None, :]
    x_ptrs = x_ptr + column[None, :].to(tl.int64) * row_stride + j[:, None]  # [WORDS, BLOCK_M]
    wanted = (column < m)[None, :]  # [1, BLOCK_M]
    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * spans_per_split
    for span in range(first, tl.minimum(first + spans_per_split, spans)):
        words = tl.load(word_ptrs + span * (16 * WORDS))  # [BLOCK_N, WORDS]
        for group in tl.static_range(SPAN // GROUP):
            group_at = (span * (SPAN // GROUP) + group) * group_stride
            parameters = tl.load(parameters_ptr + group_at + stored_row)  # [BLOCK_N]
            product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for nibble in tl.static_range(group * (GROUP // WORDS), (group + 1) * (GROUP // WORDS)):
                mask = wanted if EVEN_K else wanted & ((span * SPAN + nibble * WORDS + j)[:, None] < k)
                x = tl.load(x_ptrs + span * SPAN + nibble * WORDS, mask=mask, other=0.0)  # [WORDS, BLOCK_M]
                steps = _steps(words, parameters[:, None], nibble, INTERPRETED)  # [BLOCK_N, WORDS]
                product = tl.dot(steps, x.to(steps.dtype), product, input_precision="ieee")
            scale = (parameters & -65536).to(tl.float32, bitcast=True)  # [BLOCK_N]
            y += scale[:, None] * product
    to = column[None, :].to(tl.int64) * n + row[:, None]  # [BLOCK_N, BLOCK_M]
    mask = wanted & (row < n)[:, None]  # [BLOCK_N, BLOCK_M]
    if DIVIDED:
        size = m.to(tl.int64) * n
        tl.store(parts_ptr + split * size + to, y, mask=mask)
        # All threads have stored before one of them releases, and what was released is acquired before any loads.
        tl.debug_barrier()
        arrivals = arrivals_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(tl.num_programs(1)):
                # .cg: from the L2 cache, where the others' stores are; not from L1.
                total += tl.load(parts_ptr + part * size + to, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + to, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(arrivals, 0)
    else:
        tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=mask)


def splits_for(tiles: int, spans: int, multiprocessors: int, most: int) -> int:
    """Number of parts of a tile's spans, for the least time of the busiest multiprocessor.

    A program alternates between unpacking and multiplying, so one program occupies a multiprocessor about as long as
    two side by side: the aim is two to `most` programs, which must fit. More would wait, so many tiles are not
        divided.
    """

    def programs(splits: int) -> int:
        return -(-tiles * splits // multiprocessors)

    def spans_worked(splits: int) -> float:
        return max(programs(splits), 2) * -(-spans // splits) + (PART * splits if splits > 1 else 0)

    divisions = [splits for splits in range(1, spans + 1) if -(-spans // -(-spans // splits)) == splits]  # none empty
    return min((splits for splits in divisions if splits == 1 or programs(splits) <= most), key=spans_worked)


def stages_for(block_m: int, memory: int) -> int:
    """Number of stages such that two programs fit into a multiprocessor's `memory` bytes of shared memory."""
    return NUM_STAGES if block_m < MAX_BLOCK_M and memory >= STAGES_MEMORY else NUM_STAGES - 1


def tiles_for(out_features: int) -> int:
    """Number of tiles of W's rows, each with a counter for every MAX_BLOCK_M rows of x."""
    return triton.cdiv(out_features, BLOCK_N)


@torch.library.custom_op("spec_trl::triton_int4_mm", mutates_args=())
def triton_int4_mm(
    x: Tensor, words: Tensor, scales_and_offsets: Tensor, arrivals: Tensor, out_features: int, group: int
) -> Tensor:
    """x Wᵀ for a W in the layout of `TritonInt4`: [m, out_features] in bfloat16.

    Args:
        x: [m, in], bfloat16, the last dimension contiguous.
        words: int32 [stored_rows / 16, spans, 16, words per row and span].
        scales_and_offsets: int32 [groups, stored_rows], the last dimension contiguous.
        arrivals: int32 [tiles], zeros before and after a call: the counters of captured calls with few rows. Graphs
            with the same counters are replayed one after the other. Other calls, perhaps on another stream (a drafter
            that learns), take counters of their own, at one more launch.
        out_features: rows of W; at most stored_rows.
        group: columns that share a scale.
    """
    (m, k), stored_n = x.shape, scales_and_offsets.shape[1]
    spans, words_per_span = words.shape[1], words.shape[3]
    y = x.new_empty(m, out_features)
    if m == 0:
        return y
    # Copies of less than 4 bytes per thread would not be asynchronous.
    block_m = min(MAX_BLOCK_M, max(256 // words_per_span, triton.next_power_of_2(m)))
    multiprocessors, memory = INTERPRETED_SMS, THREE_PROGRAMS_MEMORY
    if on_gpu := x.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(x.device)
        multiprocessors, memory = gpu.multi_processor_count, gpu.shared_memory_per_multiprocessor
    tiles, blocks = tiles_for(out_features), triton.cdiv(m, block_m)
    most = 3 if block_m <= FEW_ROWS and memory >= THREE_PROGRAMS_MEMORY else 2
    splits = splits_for(tiles * blocks, spans, multiprocessors, most)
    parts = y
    if splits > 1:
        parts = x.new_empty(splits, m, out_features, dtype=torch.float32)
        if blocks > 1 or not (on_gpu and torch.cuda.is_current_stream_capturing()):
            arrivals = arrivals.new_zeros(tiles * blocks)
    with torch.cuda.device_of(x):
        _int4_mm[(tiles, splits, blocks)](
            x, words, scales_and_offsets, y, parts, arrivals, m, out_features, k, stored_n, spans,
            triton.cdiv(spans, splits), x.stride(0), scales_and_offsets.stride(0),
            GROUP=group, WORDS=words_per_span, BLOCK_M=block_m, BLOCK_N=BLOCK_N,
            EVEN_K=k % (8 * words_per_span) == 0, DIVIDED=splits > 1, INTERPRETED=not on_gpu,
            num_warps=NUM_WARPS, num_stages=stages_for(block_m, memory),
        )  # fmt: skip
    return y


@triton_int4_mm.register_fake
def _(x: Tensor, words: Tensor, scales_and_offsets: Tensor, arrivals: Tensor, out_features: int, group: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)
