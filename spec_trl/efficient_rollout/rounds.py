"""Predicts decoding rounds by a calibrated roofline, for any drafters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .profile import Profile
from .roofline import Roofline


if TYPE_CHECKING:
    from ..generation.engine.drafter import Drafter


@dataclass(frozen=True)
class RooflineRounds:
    """Rounds by a calibrated roofline."""

    target: Roofline
    drafters: Mapping[str, Roofline]  # those of networks

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """As :data:`~spec_trl.scheduling.control.RoundSeconds`."""
        if not lengths:
            return self.target.target_seconds(batch, length)
        drafts = (
            count * self.drafters[name].draft_seconds(batch, length)
            for name, count in lengths.items()
            if name in self.drafters
        )
        return self.target.verify_seconds(batch, length, width) + sum(drafts)


def roofline_rounds(drafters: "Sequence[Drafter]", profile: Profile) -> RooflineRounds:
    """What rounds of `drafters` take by a calibrated profile."""
    networks = {each.strategy: roofline_of(each, profile) for each in drafters if each.has_probabilities}
    return RooflineRounds(profile.roofline, networks)


def roofline_of(drafter: "Drafter", profile: Profile) -> Roofline:
    """Predicts rounds of `drafter`, a network.

    For another network than the policy's copy its own forwards stand in place of the self-drafter's. Their kernels are
    dense like the target's, so the target's coefficients serve. A forward that drafts many tokens is
    shared among them.
    """
    cost = drafter.cost
    if cost is None:
        return profile.roofline
    k, c, share = profile.roofline.constants, profile.roofline.coefficients, 1 / cost.tokens
    return Roofline(
        replace(k, draft_weight_bytes=cost.weight_bytes * share, draft_expert_bytes=0.0),
        replace(c, eta_D=1.0, c_D=c.c_T * share, t_D=c.t_T * share, phi_D=cost.dense_flops * share / k.dense_flops),
    )
