"""The plans of requests that run decoupled on this machine (SA §4.1), by its roofline profile."""

from dataclasses import replace

from ..efficient_rollout.profile import Profile
from ..efficient_rollout.rounds import roofline_of
from ..generation.configuration import SpeculativeConfig
from ..generation.engine.drafter import Drafter
from .affine_times import affine_times
from .decoupled_plan import plan_of_machine
from .reconfiguration import RequestPlans


def request_plans(
    drafter: Drafter,
    profile: Profile,
    config: SpeculativeConfig,
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
