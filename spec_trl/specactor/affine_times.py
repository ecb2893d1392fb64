"""D and V of SA §4.1 for this machine: affine in the batch, fitted to what its roofline predicts."""

from collections.abc import Sequence
from functools import cache

from ..efficient_rollout.roofline import Roofline
from .token_speed import AffineSeconds, DraftSeconds, VerifySeconds


def fit_affine(times: Sequence[tuple[int, float, float]]) -> AffineSeconds:
    """The line through `times`, of (batch, seconds, weight), by least squares; its parts are never negative.

    Raises:
        ValueError: there is no time.
    """
    if not times:
        raise ValueError("times is empty; a line needs the seconds of one batch at least.")
    total = sum(weight for _, _, weight in times)
    mean_batch = sum(weight * batch for batch, _, weight in times) / total
    mean = sum(weight * seconds for _, seconds, weight in times) / total
    spread = sum(weight * (batch - mean_batch) ** 2 for batch, _, weight in times)
    joint = sum(weight * (batch - mean_batch) * (seconds - mean) for batch, seconds, weight in times)
    slope = max(joint / spread, 0.0) if spread else 0.0
    if mean < slope * mean_batch:  # it would cross 0: the best line through it
        through_zero = sum(w * batch * seconds for batch, seconds, w in times) / sum(w * b * b for b, _, w in times)
        return AffineSeconds(through_zero, 0.0)
    return AffineSeconds(slope, mean - slope * mean_batch)


def affine_times(
    roofline: Roofline, largest_batch: int, length: float, draft_share: float = 1.0
) -> tuple[DraftSeconds, VerifySeconds]:
    """D and V over the batches 1, 2, 4, ... up to `largest_batch`.

    Args:
        roofline: of the target and the drafter on this machine.
        largest_batch: rows that a rollout begins with.
        length: mean cached tokens of a row.
        draft_share: share of the profiled compute that the drafter has when it runs next to the target.
    """
    batches = sorted({largest_batch, *(1 << power for power in range(largest_batch.bit_length()))})

    @cache
    def draft(gpus: int) -> AffineSeconds:
        return fit_affine([(batch, roofline.draft_seconds(batch, length) / draft_share, 1.0) for batch in batches])

    @cache
    def verify(gpus: int, positions: int) -> AffineSeconds:
        return fit_affine([(batch, roofline.verify_seconds(batch, length, positions - 1), 1.0) for batch in batches])

    return draft, verify
