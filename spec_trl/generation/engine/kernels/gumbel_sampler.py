"""Drawing tokens in one pass over the logits, in Triton. Import it only where Triton is wanted.

The same draw as `engine.noise` makes in torch, whose noise would cost as many bytes as float32 logits, written and
read again: here it is hashed in registers. Each program reads a chunk of one row once and leaves four numbers; a
second kernel merges a row's chunks in a fixed order: no atomics, the same bits at each call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise import _TO_UNIT
from . import operator


# Chosen by reasoning, not measured yet: 16 logits per thread, and 38 programs per row of 152k tokens.
CHUNK = 4096
_NUM_WARPS = 8

_UNIT = tl.constexpr(_TO_UNIT)


@triton.jit
def _gumbel(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of (key, token): int64 scalar and int32 `[n]` to float32 `[n]`.

    The bits are those of `noise._hash_into`, in unsigned numbers, which wrap and shift logically.
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
    """One row's draw from its chunks."""
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


def _shapes(logits: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return torch.empty_like(scores, dtype=torch.int64), scores, torch.empty_like(scores)


@operator("gumbel_draw", _shapes)
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
        keys: `[N]` int64 from :func:`~spec_trl.generation.engine.noise.position_keys`; None: no noise, the argmax.
        temperature: positive. x is the product with the float32 reciprocal, bit for bit what
            `logits.float() / temperature` is on CUDA (on a CPU torch divides, and the last bit may differ).
        floors: `[N]` float32; tokens with x below their row's floor count as if their logit were -inf (top-k and min-p
            act by such a threshold).
        first: `[N]` contiguous int32, with floors: tokens before it whose x equals the floor count likewise (top-p).

    Returns:
        Tokens `[N]` int64, the first of equals; their perturbed scores x + noise `[N]` float32, NaN where a logit of
        the row is NaN and -inf where no token is left; and their log-probabilities `[N]` float32 under softmax(x),
        NaN in both these cases. Where the score is NaN the token is any.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or the temperature is not positive.
    """
    _check(logits, keys, temperature, floors, first)
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


def _check(
    logits: Tensor, keys: Tensor | None, temperature: float, floors: Tensor | None, first: Tensor | None
) -> None:
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(
            f"logits are {logits.dtype} of shape {list(logits.shape)}: pass [N, vocabulary] of float32, bfloat16 or "
            "float16."
        )
    if logits.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.stride()}: make their last dimension contiguous.")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive; pass keys=None for the argmax.")
    vectors = (("keys", keys, torch.int64), ("floors", floors, torch.float32), ("first", first, torch.int32))
    for name, given, dtype in vectors:
        if given is not None and (given.shape != logits.shape[:1] or given.dtype != dtype):
            raise ValueError(
                f"{name} are {given.dtype} of shape {list(given.shape)}: pass {dtype} [{logits.shape[0]}], one for "
                "each row."
            )
