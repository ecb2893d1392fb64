"""Joins drafters to the control that decides when they draft."""

from collections.abc import Sequence
from dataclasses import replace

from ..scheduling.best_of_n import BestOfN
from ..scheduling.ladder import Ladder
from ..scheduling.profile import Profile
from ..scheduling.roofline import Roofline
from ..scheduling.selection import AcceptanceHistory
from ..scheduling.toggle import AlwaysSpeculate, Candidate, Control, NeverSpeculate, SpeculationToggle
from .configuration import SpeculativeConfig
from .drafters.base import DraftCost, Drafter


def make_control(
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    profile: Profile | None = None,
    ladder: Ladder | None = None,
    history: AcceptanceHistory | None = None,
) -> Control:
    """The control that `config.sd_toggle` asks for, over `drafters` in their order; with a ladder, that of
    `"best_of_n"`.

    Args:
        drafters: none: autoregressive decoding.
        config: `sd_toggle`, `sd_margin`, `draft_length`; τ_prev is γ at first (ER Algorithm 1 line 1).
        profile: of `sd_toggle="roofline"`.
        ladder: of these drafters.
        history: their acceptance so far; with `ladder`, None: nothing is known.

    Raises:
        ValueError: with `ladder`, two drafters have the same strategy name.
    """
    if not drafters or config.sd_toggle == "never":
        return NeverSpeculate()
    candidates = [
        Candidate(
            name=drafter.strategy,
            draft_length=config.draft_length,
            block_efficiency=float(config.draft_length),
            max_rows=drafter.max_rows,
            roofline=None if profile is None else _roofline_of(drafter.cost, profile.roofline, config.draft_length),
            is_network=drafter.has_probabilities,
        )
        for drafter in drafters
    ]
    if ladder is not None:
        return BestOfN(
            candidates, ladder, AcceptanceHistory() if history is None else history, config.sd_margin,
            None if profile is None else profile.roofline, config.best_of_n_tolerance, config.best_of_n_budget,
            config.best_of_n_race,
        )  # fmt: skip
    if config.sd_toggle == "always" and len(candidates) == 1:
        return AlwaysSpeculate(candidates[0])
    return SpeculationToggle(candidates, config.sd_margin)


def _roofline_of(cost: DraftCost | None, roofline: Roofline, draft_length: int) -> Roofline:
    """The target's roofline with this drafter's forwards in place of the self-drafter's.

    Other networks than the policy's copy run dense kernels like the target's, so the target's coefficients stand in
    for their own until measured rounds correct them. A forward that drafts many tokens is shared among them.
    """
    if cost is None:
        return roofline
    k, c = roofline.constants, roofline.coefficients
    share = 1 / min(cost.tokens, draft_length)
    return Roofline(
        replace(k, draft_weight_bytes=cost.weight_bytes * share, draft_expert_bytes=0.0),
        replace(c, eta_D=1.0, c_D=c.c_T * share, t_D=c.t_T * share, phi_D=cost.dense_flops * share / k.dense_flops),
    )
