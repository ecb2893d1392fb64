"""Where top-p cuts, in Triton: the smallest logit that may be drawn, without a sort. Import it only where Triton is.

One program per row, which bisects the bits of a float32: about 34 passes over logits that the GPU's L2 cache mostly
holds. It sums a row in a fixed order, so the cut does not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import operator


# Chosen by reasoning, not measured yet: 16 logits per thread.
CHUNK = 8192
_NUM_WARPS = 16


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """int32 numbers in the order of float32 `x`; its own inverse on their bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(
    logit_ptr: tl.tensor, token: tl.tensor, vocabulary: tl.tensor, reciprocal: tl.tensor, floor: tl.tensor
) -> tl.tensor:
    """x of some tokens; -inf below the floor."""
    x = tl.load(logit_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32) * reciprocal
    return tl.where(x < floor, float("-inf"), x) + 0.0  # -0.0 equals 0.0, and has its bits then


@triton.jit(do_not_specialize=["vocabulary"])
def _cut(
    logit_ptr: tl.tensor, floor_ptr: tl.tensor, out_ptr: tl.tensor, first_ptr: tl.tensor,
    reciprocal: tl.tensor, removed: tl.tensor, vocabulary: tl.tensor, logit_row: tl.tensor,
    FLOORS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Floor and first token of one row; `removed` is 1 - top_p."""
    row = tl.program_id(0).to(tl.int64)
    logit_ptr += row * logit_row
    floor = float("-inf")
    if FLOORS:
        floor = tl.load(floor_ptr + row)
    span = tl.arange(0, CHUNK)  # [CHUNK]

    peak = float("-inf")
    poisoned = 0
    for start in range(0, vocabulary, CHUNK):
        x = _load(logit_ptr, start + span, vocabulary, reciprocal, floor)
        peak = tl.maximum(peak, tl.max(x, 0))
        poisoned += tl.sum((x != x).to(tl.int32), 0)
    mass = 0.0
    for start in range(0, vocabulary, CHUNK):
        x = _load(logit_ptr, start + span, vocabulary, reciprocal, floor)
        mass += tl.sum(tl.exp(x - peak), 0)
    bound = mass * removed

    # The smallest x at which more than `bound` lies at it or below: the sum grows there, so a token has it.
    low = _ordered(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = _ordered(peak).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1  # in int64, which the sum needs
        below = 0.0
        for start in range(0, vocabulary, CHUNK):
            x = _load(logit_ptr, start + span, vocabulary, reciprocal, floor)
            below += tl.sum(tl.where(_ordered(x) <= middle.to(tl.int32), tl.exp(x - peak), 0.0), 0)
        if below > bound:
            high = middle
        else:
            low = middle + 1
    bits = low.to(tl.int32)
    cut = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    # Of tokens with just this x a stable sort removes the first ones, as long as `bound` allows it, but not all.
    below = 0.0
    ties = 0
    for start in range(0, vocabulary, CHUNK):
        x = _load(logit_ptr, start + span, vocabulary, reciprocal, floor)
        below += tl.sum(tl.where(x < cut, tl.exp(x - peak), 0.0), 0)
        ties += tl.sum((x == cut).to(tl.int32), 0)
    surplus = tl.minimum(tl.maximum(bound - below, 0.0) / tl.exp(cut - peak), ties - 1.0).to(tl.int32)
    first = vocabulary
    met = 0
    for start in range(0, vocabulary, CHUNK):
        token = start + span
        tied = (_load(logit_ptr, token, vocabulary, reciprocal, floor) == cut) & (token < vocabulary)
        rank = met + tl.cumsum(tied.to(tl.int32), 0)  # [CHUNK], from 1 on
        first = tl.minimum(first, tl.min(tl.where(tied & (rank > surplus), token, vocabulary), 0))
        met += tl.sum(tied.to(tl.int32), 0)
    # NaN, or nothing is left: transformers removes nothing.
    lost = (poisoned != 0) | (peak == float("-inf")) | (peak == float("inf"))
    tl.store(out_ptr + row, tl.where(lost, float("-inf"), cut))
    tl.store(first_ptr + row, tl.where(lost, 0, first))


def _shapes(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    cuts = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return cuts, torch.empty_like(cuts, dtype=torch.int32)


@operator("top_p_floors", _shapes)
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
    reciprocal = float(1 / torch.tensor(temperature, dtype=torch.float32))  # as in `fused_draw`, bit for bit
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _cut[(rows,)](
            logits, cuts if floors is None else floors, cuts, first, reciprocal, 1 - top_p, vocabulary,
            logits.stride(0), FLOORS=floors is not None, CHUNK=CHUNK, num_warps=_NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return cuts, first
