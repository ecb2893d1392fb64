"""D and V of SA §4.1 for this machine: affine in the batch, fitted to what its roofline predicts."""

from collections.abc import Sequence
from functools import cache

from .roofline import Roofline
from .token_speed import AffineSeconds, DraftSeconds, VerifySeconds


def fit_affine(times: Sequence[tuple[int, float]]) -> AffineSeconds:
    """The line through `times`, pairs of (batch, seconds), by least squares; its parts are never negative.

    Raises:
        ValueError: there is no time.
    """
    if not times:
        raise ValueError("times is empty; a line needs the seconds of one batch at least.")
    count = len(times)
    mean_batch, mean = sum(batch for batch, _ in times) / count, sum(seconds for _, seconds in times) / count
    spread = sum((batch - mean_batch) ** 2 for batch, _ in times)
    joint = sum((batch - mean_batch) * (seconds - mean) for batch, seconds in times)
    slope = max(joint / spread, 0.0) if spread else 0.0
    if mean < slope * mean_batch:  # it would cross 0: the best line through it
        return AffineSeconds(sum(batch * seconds for batch, seconds in times) / sum(b * b for b, _ in times), 0.0)
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
        return fit_affine([(batch, roofline.draft_seconds(batch, length) / draft_share) for batch in batches])

    @cache
    def verify(gpus: int, positions: int) -> AffineSeconds:
        return fit_affine([(batch, roofline.verify_seconds(batch, length, positions - 1)) for batch in batches])

    return draft, verify
