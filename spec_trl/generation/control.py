"""Joins drafters to the control that decides when they draft."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ..scheduling.best_of_n import BestOfN
from ..scheduling.control import AlwaysSpeculate, Candidate, Control, NeverSpeculate
from ..scheduling.ladder import Ladder
from ..scheduling.profile import Profile
from ..scheduling.roofline import Roofline
from ..scheduling.selection import AcceptanceHistory
from ..scheduling.toggle import SpeculationToggle
from . import kept
from .configuration import SpeculativeConfig
from .engine.drafter import DraftCost, Drafter


def make_control(
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    profile: Profile | None = None,
    ladder: Ladder | None = None,
    history: AcceptanceHistory | None = None,
) -> Control:
    """The control that `config.sd_toggle` asks for, over `drafters` in their order; with a ladder, that of
    `"best_of_n"` and `"auto"`.

    Args:
        drafters: none: autoregressive decoding.
        config: `sd_toggle`, `sd_margin`, `draft_length`; τ_prev is γ at first (ER Algorithm 1 line 1).
        profile: predicts their rounds; None: only measuring tells.
        ladder: of these drafters.
        history: their acceptance so far; with `ladder`, None: nothing is known.

    Raises:
        ValueError: with `ladder`, two drafters have the same strategy name.
    """
    if config.sd_toggle == "never":
        return NeverSpeculate("sd_toggle=never")
    if not drafters:
        return NeverSpeculate()
    candidates = [
        Candidate(
            name=drafter.strategy,
            draft_length=config.draft_length,
            block_efficiency=float(config.draft_length),
            max_rows=drafter.max_rows,
            roofline=_costs_of(drafter, profile, ladder, config.draft_length),
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


@dataclass(frozen=True)
class KeptControl:
    """A control, and what it was made for.

    Args:
        name: in the registry: of drafters and options.
        sources: profile and ladder.
        control: made of them.
        history: how drafters of `"auto"` and `"best_of_n"` fared with the model.
    """

    name: str
    sources: tuple[Profile | None, Ladder | None]
    control: Control
    history: AcceptanceHistory


_HISTORY = "acceptance"


def acceptance_history_of(model: PreTrainedModel) -> AcceptanceHistory:
    """How drafters of `"auto"` and `"best_of_n"` fared with `model` so far, kept from call to call."""
    found: AcceptanceHistory | None = kept.look(model, _HISTORY)
    if found is None:
        found = AcceptanceHistory()
        kept.keep(model, _HISTORY, found)
    return found


def take_control(
    model: PreTrainedModel,
    drafters: Sequence[Drafter],
    config: SpeculativeConfig,
    profile: Profile | None,
    ladder: Ladder | None,
) -> KeptControl:
    """The control for `model`: that of the last call with the same options, which knows by now what rounds take, with
    logits processors or long texts that no profile has seen.

    A generation has it, and the history of acceptance, for itself, since a stopping criterion or another thread may
    generate with the same model: :func:`keep_control` puts both back.
    """
    # Assistants go by what they cost; they themselves would be kept alive.
    members = [(drafter.strategy, drafter.max_rows, drafter.cost) for drafter in drafters]
    name = f"control of {members}, {replace(config, seed=None, best_of_n_assistants=None)}"
    found: KeptControl | None = kept.take(model, name)
    history: AcceptanceHistory | None = kept.take(model, _HISTORY)
    history = AcceptanceHistory() if history is None else history
    if found is None or found.sources != (profile, ladder):
        control = make_control(drafters, config, profile, ladder, history)
    else:
        control = found.control
        if isinstance(control, BestOfN):
            control.history = history  # another call may have brought back its own
    return KeptControl(name, (profile, ladder), control, history)


def keep_control(model: PreTrainedModel, taken: KeptControl) -> None:
    """For the next call; until `spec_trl.release(model)`."""
    kept.keep(model, taken.name, taken)
    kept.keep(model, _HISTORY, taken.history)


def _costs_of(drafter: Drafter, profile: Profile | None, ladder: Ladder | None, draft_length: int) -> Roofline | None:
    """What predicts rounds of `drafter`; None where only measuring tells, or the ladder, which has measured."""
    if profile is None or (ladder is not None and drafter.cost is not None):
        return None
    return _roofline_of(drafter.cost, profile.roofline, draft_length)


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
