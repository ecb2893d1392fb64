"""Joins drafters to the control that decides when they draft."""

from collections.abc import Sequence
from dataclasses import replace

from ..scheduling.profile import Profile
from ..scheduling.roofline import Roofline
from ..scheduling.toggle import AlwaysSpeculate, Candidate, Control, NeverSpeculate, SpeculationToggle
from .configuration import SpeculativeConfig
from .constants import model_constants
from .drafters.base import Drafter
from .drafters.small_model import SmallModelDrafter


def make_control(
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    profile: Profile | None = None,
) -> Control:
    """The control that `config.sd_toggle` asks for, over `drafters` in their order.

    Args:
        drafters: none: autoregressive decoding.
        config: `sd_toggle`, `sd_margin`, `draft_length`; τ_prev is γ at first (ER Algorithm 1 line 1).
        profile: of `sd_toggle="roofline"`.
    """
    if not drafters or config.sd_toggle == "never":
        return NeverSpeculate()
    candidates = [
        Candidate(
            name=drafter.strategy,
            draft_length=config.draft_length,
            block_efficiency=float(config.draft_length),
            max_rows=drafter.max_rows,
            roofline=None if profile is None else _roofline_of(drafter, profile.roofline),
            is_network=drafter.has_probabilities,
        )
        for drafter in drafters
    ]
    if config.sd_toggle == "always" and len(candidates) == 1:
        return AlwaysSpeculate(candidates[0])
    return SpeculationToggle(candidates, config.sd_margin)


def _roofline_of(drafter: Drafter, roofline: Roofline) -> Roofline:
    """The target's roofline with this drafter's forwards in place of the self-drafter's.

    A small model runs dense kernels like the target's, so the target's coefficients stand in for its own until
    measured rounds correct them.
    """
    if not isinstance(drafter, SmallModelDrafter):
        return roofline
    assistant, c = model_constants(drafter.network), roofline.coefficients
    return Roofline(
        replace(roofline.constants, draft_weight_bytes=assistant.weight_bytes, draft_expert_bytes=0.0),
        replace(c, eta_D=1.0, c_D=c.c_T, t_D=c.t_T, phi_D=assistant.dense_flops / roofline.constants.dense_flops),
    )
