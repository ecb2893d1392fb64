"""Draws tokens in one pass over the logits, and finds the cut of top-p without a sort, in Triton. Import it only where
Triton is wanted.

`fused_draw` draws what `engine.noise` draws in torch, whose noise costs as many bytes as float32 logits, written and
read again: here it is hashed in registers. Each program reads a chunk of one row once and leaves four numbers. A
second kernel merges a row's chunks in a fixed order: no atomics, the same bits at every call.

`top_p_floors` searches the cut among all numbers of the logits' dtype, in the order of their bits, 16 ways at a time:
a pass over the logits sums the probability at or below each of 16 thresholds, and the next pass divides the range
between two of them. With the pass for the peak these are 5 passes over bfloat16 or float16 and 9 over float32, and one
chunk of a row is read once more. All sums have a fixed order, the same for every threshold: more lies below a higher
one, whatever is rounded, and the cut does not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...sampling.noise import _TO_UNIT
from . import operator


# Chosen by the code compiled for Hopper, not measured yet: 16 logits per thread, 38 programs per row of 152k tokens.
CHUNK = 4096
_NUM_WARPS = 8
WAYS = 16  # a power of two: a pass finds four bits of the cut

_UNIT = tl.constexpr(_TO_UNIT)


@triton.jit
def _gumbel(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of (key, token): int64 scalar and int32 `[n]` to float32 `[n]`.

    The bits are those of `noise._hash_into`, in unsigned numbers, with wrapping and logical shifts.
    """
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    bits = (token.to(tl.uint32) * 0x9E3779B1) ^ low  # [n]
    bits *= 0x85EBCA6B
    bits = (bits ^ (bits >> 15)) + high
    bits *= 0xC2B2AE35
    bits = (bits ^ (bits >> 13)) + low
    bits *= 0x27D4EB2F
    bits ^= bits >> 16
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _UNIT  # (0, 1)
    # log1p(-u) without libdevice (Kahan): the rounding of y = 1 - u appears in log(y) and in y - 1 alike.
    rounded = 1.0 - uniform
    distance = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    exponential = tl.where(rounded == 1.0, uniform, tl.log(rounded) * (uniform / distance))  # -log1p(-u)
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["chunks"])  # loads are vectors where 16 divides the vocabulary, and only if it is known
def _draw_chunk(
    logit_ptr: tl.tensor, key_ptr: tl.tensor, floor_ptr: tl.tensor, first_ptr: tl.tensor,
    stat_ptr: tl.tensor, index_ptr: tl.tensor,
    reciprocal: tl.tensor, vocabulary: tl.tensor, chunks: tl.tensor,
    logit_row: tl.tensor, key_row: tl.tensor, floor_row: tl.tensor,
    NOISE: tl.constexpr, FLOORS: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Maximum and exponential sum of a chunk's x, its best perturbed score (NaN if any x is NaN) and where that is."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    x = tl.load(logit_ptr + row * logit_row + token, mask=token < vocabulary, other=float("-inf"))
    x = x.to(tl.float32) * reciprocal
    poisoned = tl.max((x != x).to(tl.int32), 0)
    kept = x == x
    if FLOORS:
        floor = tl.load(floor_ptr + row * floor_row)
        kept = kept & (x >= floor)
        if FIRST:
            kept = kept & ((x > floor) | (token >= tl.load(first_ptr + row)))
    x = tl.where(kept, x, float("-inf"))
    score = x
    if NOISE:
        score = x + _gumbel(tl.load(key_ptr + row * key_row), token)
    best = tl.max(score, 0)
    index = tl.min(tl.where(score == best, token, vocabulary - 1), 0)  # the lowest of the best
    peak = tl.max(x, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf would be NaN
    total = tl.sum(tl.exp(x - shift), 0)

    to = row * chunks + chunk
    tl.store(stat_ptr + to * 3, peak)
    tl.store(stat_ptr + to * 3 + 1, total)
    tl.store(stat_ptr + to * 3 + 2, tl.where(poisoned != 0, float("nan"), best))
    tl.store(index_ptr + to, index)


@triton.jit(do_not_specialize=["chunks"])
def _merge_chunks(
    stat_ptr: tl.tensor, index_ptr: tl.tensor, logit_ptr: tl.tensor,
    token_ptr: tl.tensor, score_ptr: tl.tensor, logprob_ptr: tl.tensor,
    reciprocal: tl.tensor, chunks: tl.tensor, logit_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)  # [chunks]
    at = stat_ptr + (row * chunks + chunk) * 3
    peak = tl.load(at, mask=chunk < chunks, other=float("-inf"))
    total = tl.load(at + 1, mask=chunk < chunks, other=0.0)
    score = tl.load(at + 2, mask=chunk < chunks, other=float("-inf"))
    index = tl.load(index_ptr + row * chunks + chunk, mask=chunk < chunks, other=0x7FFFFFFF)

    poisoned = tl.max((score != score).to(tl.int32), 0) != 0
    score = tl.where(score == score, score, float("-inf"))
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, index, 0x7FFFFFFF), 0)
    highest = tl.max(peak, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    normaliser = shift + tl.log(tl.sum(total * tl.exp(peak - shift), 0))
    x = tl.load(logit_ptr + row * logit_row + token).to(tl.float32) * reciprocal
    # -inf: nothing is left to draw, as the difference of two -inf says in torch.
    lost = poisoned | (best == float("-inf"))
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(score_ptr + row, tl.where(poisoned, float("nan"), best))
    tl.store(logprob_ptr + row, tl.where(lost, float("nan"), x - normaliser))


def _draw_shapes(logits: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return torch.empty_like(scores, dtype=torch.int64), scores, torch.empty_like(scores)


@operator("gumbel_draw", _draw_shapes)
def fused_draw(
    logits: Tensor,
    keys: Tensor | None,
    temperature: float = 1.0,
    floors: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws one token per row from softmax(x), x = float32(logits) / temperature, by the Gumbel-max trick.

    A call compiles kernels where dtypes or strides are new; so call once before capturing. No gradient.

    Args:
        logits: `[N, vocabulary]` float32, bfloat16 or float16; rows any stride apart, each contiguous.
        keys: `[N]` int64 from :func:`~.position_keys`; None: no noise, the argmax.
        temperature: positive. x is the product with the float32 reciprocal, bit for bit what
            `logits.float() / temperature` is on CUDA (on a CPU torch divides, and the last bit may differ).
        floors: `[N]` float32; tokens with x below their row's floor count as if their logit were -inf (top-k and min-p
            act by such a threshold).
        first: `[N]` contiguous int32, with floors: tokens before it whose x equals the floor count likewise (top-p).

    Returns:
        Tokens `[N]` int64, the first of equals; their perturbed scores x + noise `[N]` float32, NaN where a logit of
        the row is NaN and -inf where no token is left; and their log-probabilities `[N]` float32 under softmax(x),
        NaN in both these cases. Where the score is NaN the token is any.
    """
    rows, vocabulary = logits.shape
    tokens = logits.new_empty(rows, dtype=torch.int64)
    scores = logits.new_empty(rows, dtype=torch.float32)
    logprobs = torch.empty_like(scores)
    if rows == 0:
        return tokens, scores, logprobs
    chunks = triton.cdiv(vocabulary, CHUNK)
    stats = logits.new_empty(rows, chunks, 3, dtype=torch.float32)
    indices = logits.new_empty(rows, chunks, dtype=torch.int32)
    # As torch does it on CUDA; in float32, so that the caller's floors and our x are rounded alike.
    reciprocal = float(1 / torch.tensor(temperature, dtype=torch.float32))
    # Without contraction to fused multiply-add: the same bits whichever branches a kernel was compiled with.
    options = dict(enable_fp_fusion=False)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _draw_chunk[(rows, chunks)](
            logits, stats if keys is None else keys, stats if floors is None else floors,
            stats if first is None else first, stats, indices,
            reciprocal, vocabulary, chunks, logits.stride(0), 0 if keys is None else keys.stride(0),
            0 if floors is None else floors.stride(0),
            NOISE=keys is not None, FLOORS=floors is not None, FIRST=first is not None, CHUNK=CHUNK,
            num_warps=_NUM_WARPS, **options,
        )  # fmt: skip
        _merge_chunks[(rows,)](
            stats, indices, logits, tokens, scores, logprobs, reciprocal, chunks, logits.stride(0),
            BLOCK=triton.next_power_of_2(chunks), num_warps=1, **options,
        )  # fmt: skip
    return tokens, scores, logprobs


@triton.jit
def _key(bits: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Integers in the order of the floating-point numbers whose bits these are; its own inverse."""
    return bits ^ ((bits >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))


@triton.jit
def _number(key: tl.tensor, reciprocal: tl.tensor, INT: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """x of the logits with these keys."""
    bits = _key(key.to(INT), INT.primitive_bitwidth)
    return bits.to(DTYPE, bitcast=True).to(tl.float32) * reciprocal


@triton.jit
def _load(
    logit_ptr: tl.tensor, token: tl.tensor, vocabulary: tl.tensor, reciprocal: tl.tensor, floor: tl.tensor
) -> tl.tensor:
    x = tl.load(logit_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32) * reciprocal
    return tl.where(x < floor, float("-inf"), x)


@triton.jit
def _range(
    peak_ptr: tl.tensor, key_ptr: tl.tensor, sum_ptr: tl.tensor, part_ptr: tl.tensor,
    removed: tl.tensor, row: tl.tensor, rows: tl.tensor, chunks: tl.tensor, step: tl.tensor,
    INT: tl.constexpr, WAYS: tl.constexpr, ALL_CHUNKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """What the steps before this one have found of a row: the lowest and the highest key that the cut may have, in
    int64; the probability to remove and what lies below the lowest key, both times the row's mass; and which way the
    last step has led."""
    BITS: tl.constexpr = INT.primitive_bitwidth
    way = tl.arange(0, WAYS)
    low = tl.full((), -(1 << (BITS - 1)), tl.int64)
    high = _key(tl.load(peak_ptr + row).to(INT, bitcast=True), BITS).to(tl.int64)
    bound = 0.0
    below = 0.0
    taken = 0
    if step > 0:
        before = (step - 1) % 2 * rows + row
        low = tl.load(key_ptr + before * 2)
        high = tl.load(key_ptr + before * 2 + 1)
        bound = tl.load(sum_ptr + before * 2)
        below = tl.load(sum_ptr + before * 2 + 1)
        chunk = tl.arange(0, ALL_CHUNKS)
        at = ((before * chunks + chunk) * WAYS)[:, None] + way[None, :]
        sums = tl.sum(tl.load(part_ptr + at, mask=(chunk < chunks)[:, None], other=0.0), 0)  # [WAYS]
        if step == 1:  # the last threshold was the peak
            bound = removed * tl.sum(tl.where(way == WAYS - 1, sums, 0.0), 0)
        taken = tl.min(tl.where(sums > bound, way, WAYS - 1), 0)
        width = high - low
        high = low + (width * (taken + 1)) // WAYS
        if taken > 0:
            low += (width * taken) // WAYS + 1
            below = tl.sum(tl.where(way == taken - 1, sums, 0.0), 0)
    return low, high, bound, below, taken


@triton.jit(do_not_specialize=["chunks", "step"])
def _narrow(
    logit_ptr: tl.tensor, floor_ptr: tl.tensor, peak_ptr: tl.tensor,
    key_ptr: tl.tensor, sum_ptr: tl.tensor, part_ptr: tl.tensor, tie_ptr: tl.tensor,
    reciprocal: tl.tensor, removed: tl.tensor, vocabulary: tl.tensor, chunks: tl.tensor, logit_row: tl.tensor,
    step: tl.tensor,
    FLOORS: tl.constexpr, INT: tl.constexpr, WAYS: tl.constexpr, STEPS: tl.constexpr, ALL_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """A chunk's share of what lies at or below each threshold; in the last step, how many tokens lie at each."""
    rows = tl.num_programs(0)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    low, high, bound, below, _ = _range(
        peak_ptr, key_ptr, sum_ptr, part_ptr, removed, row, rows, chunks, step, INT, WAYS, ALL_CHUNKS
    )
    now = step % 2 * rows + row
    if chunk == 0:
        tl.store(key_ptr + now * 2, low)
        tl.store(key_ptr + now * 2 + 1, high)
        tl.store(sum_ptr + now * 2, bound)
        tl.store(sum_ptr + now * 2 + 1, below)
    DTYPE: tl.constexpr = logit_ptr.dtype.element_ty
    peak = tl.load(peak_ptr + row).to(tl.float32) * reciprocal
    floor = float("-inf")
    if FLOORS:
        floor = tl.load(floor_ptr + row)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(logit_ptr + row * logit_row, token, vocabulary, reciprocal, floor)  # [CHUNK]
    weight = tl.exp(x - peak)[None, :]
    x = x[None, :]
    AT_ONCE: tl.constexpr = 4 if WAYS > 4 else WAYS  # more would spill registers
    for some in range(0, WAYS, AT_ONCE):
        way = some + tl.arange(0, AT_ONCE)
        threshold = _number(low + ((high - low) * (way + 1)) // WAYS, reciprocal, INT, DTYPE)[:, None]  # [AT_ONCE, 1]
        to = (now * chunks + chunk) * WAYS + way
        tl.store(part_ptr + to, tl.sum(tl.where(x <= threshold, weight, 0.0), 1))
        if step == STEPS - 1:
            tl.store(tie_ptr + (row * chunks + chunk) * WAYS + way, tl.sum((x == threshold).to(tl.int32), 1))


@triton.jit(do_not_specialize=["chunks"])
def _finish(
    logit_ptr: tl.tensor, floor_ptr: tl.tensor, peak_ptr: tl.tensor,
    key_ptr: tl.tensor, sum_ptr: tl.tensor, part_ptr: tl.tensor, tie_ptr: tl.tensor,
    out_ptr: tl.tensor, first_ptr: tl.tensor,
    reciprocal: tl.tensor, removed: tl.tensor, vocabulary: tl.tensor, chunks: tl.tensor, logit_row: tl.tensor,
    FLOORS: tl.constexpr, INT: tl.constexpr, WAYS: tl.constexpr, STEPS: tl.constexpr, ALL_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    low, _, bound, below, taken = _range(
        peak_ptr, key_ptr, sum_ptr, part_ptr, removed, row, tl.num_programs(0), chunks, STEPS, INT, WAYS,
        ALL_CHUNKS,
    )  # fmt: skip
    cut = _number(low, reciprocal, INT, logit_ptr.dtype.element_ty) + 0.0  # -0.0 becomes 0.0
    peak = tl.load(peak_ptr + row).to(tl.float32) * reciprocal
    floor = float("-inf")
    if FLOORS:
        floor = tl.load(floor_ptr + row)

    # Of tokens with just this x a stable sort removes the first ones, as long as `bound` allows it, but not all.
    chunk = tl.arange(0, ALL_CHUNKS)
    counts = tl.load(tie_ptr + (row * chunks + chunk) * WAYS + taken, mask=chunk < chunks, other=0)  # [ALL_CHUNKS]
    surplus = tl.minimum(tl.maximum(bound - below, 0.0) / tl.exp(cut - peak), tl.sum(counts, 0) - 1.0).to(tl.int32)
    passed = tl.cumsum(counts, 0) <= surplus
    token = tl.sum(passed.to(tl.int32), 0) * CHUNK + tl.arange(0, CHUNK)  # of the chunk with the first that is kept
    x = _load(logit_ptr + row * logit_row, token, vocabulary, reciprocal, floor)
    tied = (x == cut) & (token < vocabulary)
    rank = tl.sum(tl.where(passed, counts, 0), 0) + tl.cumsum(tied.to(tl.int32), 0)  # [CHUNK], from 1 on
    first = tl.min(tl.where(tied & (rank > surplus), token, vocabulary), 0)
    # NaN, or nothing is left: transformers removes nothing.
    kept = (peak > float("-inf")) & (peak < float("inf")) & (peak >= floor)
    tl.store(out_ptr + row, tl.where(kept, cut, float("-inf")))
    tl.store(first_ptr + row, tl.where(kept, first, 0))


def _floor_shapes(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    cuts = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return cuts, torch.empty_like(cuts, dtype=torch.int32)


@operator("top_p_floors", _floor_shapes)
def top_p_floors(
    logits: Tensor, top_p: float, temperature: float = 1.0, floors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What top-p leaves of x = float32(logits) / temperature: all above a floor, and from some token on those at it.

    Args:
        logits: `[N, vocabulary]` float32, bfloat16 or float16; rows any stride apart, each contiguous.
        top_p: between 0 and 1.
        temperature: positive.
        floors: `[N]` float32; x below their row's floor are -inf.

    Returns:
        Floors `[N]` float32, and `[N]` int32: the first token that may be drawn although its x only equals the floor.
    """
    rows, vocabulary = logits.shape
    cuts = logits.new_empty(rows, dtype=torch.float32)
    first = logits.new_empty(rows, dtype=torch.int32)
    if rows == 0:
        return cuts, first
    chunks = triton.cdiv(vocabulary, CHUNK)
    peaks = logits.amax(1)  # NaN where a logit is
    # Each step reads what the one before it has written, and writes beside that.
    keys = logits.new_empty(2, rows, 2, dtype=torch.int64)
    sums = logits.new_empty(2, rows, 2, dtype=torch.float32)
    parts = logits.new_empty(2, rows, chunks, WAYS, dtype=torch.float32)
    ties = logits.new_empty(rows, chunks, WAYS, dtype=torch.int32)
    reciprocal = float(1 / torch.tensor(temperature, dtype=torch.float32))  # as in `fused_draw`, bit for bit
    found = logits, cuts if floors is None else floors, peaks, keys, sums, parts, ties
    numbers = reciprocal, 1 - top_p, vocabulary, chunks, logits.stride(0)
    steps = 8 * logits.element_size() // (WAYS.bit_length() - 1)
    options = dict(
        FLOORS=floors is not None, INT=tl.int32 if logits.dtype == torch.float32 else tl.int16, WAYS=WAYS, STEPS=steps,
        ALL_CHUNKS=triton.next_power_of_2(chunks), CHUNK=CHUNK, num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        for step in range(steps):
            _narrow[(rows, chunks)](*found, *numbers, step, **options)
        _finish[(rows,)](*found, cuts, first, *numbers, **options)
    return cuts, first
