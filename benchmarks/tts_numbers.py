"""Arithmetic of the TTS benchmark: bins of output depth, acceptance lengths, intervals, the paper's tables."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy


BINS = 21
"""Equal bins of output depth; seven of them are a third of the output."""
THIRDS = ("first", "middle", "last")
RESAMPLES = 2000

Record = dict[str, Any]
"""What one way did with one request: "blocks" and "committed" tokens, each by depth bin, "seconds", and more."""

# arXiv 2605.09329. Tab. 1 and 2: mean gains of the acceptance length at S = 1.
PAPER_GAIN = {"dflash": 0.41, "eagle3": 0.34}
# Tab. 7 (DFlash, Qwen3-8B): gains in % on its eight benchmarks.
PAPER_STRIDES = {
    1: (38.5, 33.1, 47.3, 55.2, 13.3, 50.3, 53.1, 22.8),
    5: (30.7, 27.0, 34.3, 44.9, 8.3, 42.1, 39.2, 15.2),
    15: (19.0, 18.1, 24.1, 32.9, 5.4, 28.9, 26.2, 9.0),
    30: (12.6, 12.1, 17.8, 24.4, 3.7, 20.0, 18.2, 6.3),
    50: (10.2, 8.0, 14.7, 19.8, 2.3, 14.2, 13.3, 4.8),
}


def paper_stride_gain(stride: int) -> float | None:
    """Mean gain of Tab. 7's benchmarks at S = `stride`, as a share; None where the table has no such column."""
    gains = PAPER_STRIDES.get(stride)
    return None if gains is None else statistics.fmean(gains) / 100


def depth_bin(depth: int, new_tokens: int) -> int:
    """The bin of output position `depth` among `new_tokens`."""
    return min(depth * BINS // new_tokens, BINS - 1)


def by_depth(rounds: Sequence[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """Blocks, and tokens they committed, by the depth at which each block began.

    Args:
        rounds: tokens that each decoding round of one request committed, after its first token.
        new_tokens: of the request. A round with room for one token alone drafts nothing and is no block.
    """
    blocks, committed, depth = [0] * BINS, [0] * BINS, 1
    for count in rounds:
        if depth < new_tokens - 1:
            blocks[depth_bin(depth, new_tokens)] += 1
            committed[depth_bin(depth, new_tokens)] += count
        depth += count
    return blocks, committed


def acceptance_length(records: Sequence[Record], bins: slice = slice(None)) -> float | None:
    """Committed tokens per block, the corrected or bonus token included, of all records together; None: no blocks."""
    blocks = sum(sum(record["blocks"][bins]) for record in records)
    return sum(sum(record["committed"][bins]) for record in records) / blocks if blocks else None


def third(which: int) -> slice:
    """The depth bins of a third of the output, 0 to 2."""
    size = BINS // len(THIRDS)
    return slice(which * size, (which + 1) * size)


def gain(frozen: float | None, other: float | None) -> float | None:
    """Relative change; None where one of the two is missing."""
    return None if frozen is None or other is None else other / frozen - 1


def gain_interval(
    frozen: Sequence[Record], other: Sequence[Record], seed: int = 0, bins: slice = slice(None)
) -> tuple[float, float] | None:
    """95 % of the gain in acceptance length, by a paired bootstrap over requests; None: fewer than two of them."""
    if len(frozen) < 2:
        return None
    # [requests, (frozen blocks, frozen committed, other blocks, other committed)]
    counts = numpy.array(
        [
            [sum(record[name][bins]) for record in pair for name in ("blocks", "committed")]
            for pair in zip(frozen, other, strict=True)
        ],
        dtype=float,
    )
    drawn = numpy.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    sums = counts[drawn].sum(axis=1)  # [resamples, 4]
    sums = sums[(sums[:, 0] > 0) & (sums[:, 2] > 0)]
    if not len(sums):
        return None
    low, high = numpy.percentile(sums[:, 3] / sums[:, 2] / (sums[:, 1] / sums[:, 0]) - 1, (2.5, 97.5))
    return float(low), float(high)


def speed_ratio(frozen: Sequence[Record], other: Sequence[Record]) -> float:
    """Median over requests of the frozen drafter's seconds over the other's: both made the same number of tokens.

    Where the frozen drafter ran once more next to the other one, those are its seconds.
    """
    return statistics.median(
        b.get("frozen_seconds", a["seconds"]) / b["seconds"] for a, b in zip(frozen, other, strict=True)
    )


def median_speed(records: Sequence[Record]) -> float:
    """Tokens per second, median over requests."""
    return statistics.median(record["tokens"] / record["seconds"] for record in records)
