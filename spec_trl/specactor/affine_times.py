"""D and V of SA §4.1 for this machine: affine in the batch, fitted to what its roofline predicts."""

from functools import cache

from ..efficient_rollout.roofline import Roofline
from ..scheduling.affine_seconds import AffineSeconds, fit_affine
from .token_speed import DraftSeconds, VerifySeconds


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
