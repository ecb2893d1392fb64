"""Plans of decoupled execution on this machine (SA §4.1): D and V affine in the batch, by its roofline profile."""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ..efficient_rollout.profile import Profile
from ..efficient_rollout.roofline import Roofline
from ..efficient_rollout.rounds import roofline_of
from ..scheduling.affine_seconds import AffineSeconds, fit_affine
from .decoupled_plan import plan_of_machine
from .reconfiguration import RequestPlans
from .token_speed import DraftSeconds, VerifySeconds


if TYPE_CHECKING:
    from ..generation.configuration import SpeculativeConfig
    from ..generation.engine.drafter import Drafter


def request_plans(
    drafter: "Drafter",
    profile: Profile,
    config: "SpeculativeConfig",
    acceptance: float,
    capacity: int,
    length: int,
    share: float,
) -> RequestPlans[int]:
    """The plans of requests, all that of the machine at first.

    Args:
        drafter: that may run decoupled.
        profile: of the target on this machine.
        config: `decoupled_execution="always"` decouples whatever the plan.
        acceptance: p, of an earlier call.
        capacity: most rows in flight.
        length: the longest total length of a row, tokens.
        share: the cores that the drafter's thread gets over those that the profile was measured with; 0 or less counts
            as 1.
    """
    roofline = roofline_of(drafter, profile)
    draft, verify = affine_times(roofline, capacity, length / 2, share if share > 0 else 1.0)
    alone, _ = affine_times(roofline, capacity, length / 2)
    plan = plan_of_machine(
        acceptance, config.draft_length, capacity, alone(1), draft(1), lambda positions: verify(1, positions)
    )
    if config.decoupled_execution == "always":
        plan = replace(plan, mode="decoupled", window=config.draft_length + 1)
    return RequestPlans(plan, draft, verify)


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
