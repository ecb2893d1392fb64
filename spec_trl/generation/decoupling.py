"""Whether the drafter of a call runs decoupled (SA §4.1), and by which plan."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..measuring.known_rounds import find_profile
from ..papers import load
from .configuration import SpeculativeConfig
from .drafters.decoupled.decoupled_drafter import DecoupledDrafter
from .drafters.decoupled.pipe import DraftThread
from .engine.attention import keeps_states
from .engine.drafter import Drafter
from .engine.statistics import SpeculationStatistics
from .session import Session
from .strategies import as_drafters


if TYPE_CHECKING:
    from ..specactor.reconfiguration import RequestPlans


def decoupled(
    drafters: list[Drafter],
    model: PreTrainedModel,
    config: SpeculativeConfig,
    rejects: bool,
    capacity: int,
    length: int,
) -> list[Drafter]:
    """The call's `drafters`, with a thread for each one that runs decoupled.

    Args:
        drafters: of the call.
        model: the target.
        config: its `decoupled_execution` decides.
        rejects: whether rejection sampling verifies.
        capacity: most rows in flight.
        length: the longest total length of a row, tokens.

    Raises:
        ValueError: a drafter must run decoupled and cannot.
    """
    if config.decoupled_execution == "always":
        if rejects and drafters:
            raise ValueError(
                'verification="rejection" does not go with decoupled_execution="always". Use verification="exact".'
            )
        return [
            drafter
            if isinstance(drafter, DecoupledDrafter)
            else DecoupledDrafter(DraftThread(drafter), _plans(drafter, model, config, capacity, length))
            for drafter in drafters
        ]
    # A thread would share a GPU with the target: only idle cores of a CPU make a second worker.
    is_open = config.decoupled_execution == "auto" and model.device.type == "cpu" and _drafting_share() > 0
    if keeps_states(model.config) and drafters and drafters[0].strategy == "self":
        is_open = False  # the copy would need the states of each window
    if is_open and len(drafters) == 1 and drafters[0].drafts_ahead and not rejects:
        plans = _plans(drafters[0], model, config, capacity, length)
        if plans is not None and plans.group.mode == "decoupled":
            return [DecoupledDrafter(DraftThread(drafters[0]), plans)]
    return drafters


def check_device(
    config: SpeculativeConfig, device: torch.device, drafter: Drafter | Sequence[Drafter] | None = None
) -> None:
    """Raises ValueError where a drafter would run on a thread beside a target on `device`, which is no CPU; `drafter`:
    drafts in place of the strategy's."""
    if device.type == "cpu":
        return
    drafters = [None] if drafter is None else as_drafters(drafter)
    pipes = [each.pipe if isinstance(each, DecoupledDrafter) else None for each in drafters]
    if any(isinstance(pipe, DraftThread) for pipe in pipes):
        option = "drafter=DecoupledDrafter(DraftThread(...))"
    elif config.decoupled_execution == "always" and None in pipes:
        option = 'decoupled_execution="always"'
    else:
        return
    raise ValueError(
        f"{option} with the model on {device}: the drafter's thread would share that device and launch each operation "
        'by itself, and decoding would be slower than without it. Set decoupled_execution="never" or "auto" and pass '
        "the drafter itself, or give it a rank of its own (docs/decoupled.md)."
    )


def keep_acceptance(session: Session, drafters: Sequence[Drafter], statistics: SpeculationStatistics) -> None:
    """Keeps how often first drafts were accepted, by which later calls plan."""
    for drafter in drafters:
        acceptance = statistics.per_drafter[drafter.strategy].first_token_acceptance
        if not math.isnan(acceptance):
            session.acceptance[drafter.strategy] = acceptance


def _drafting_share() -> float:
    """The cores that the drafter's thread gets over those that a profile was measured with, at most 1."""
    return min((len(os.sched_getaffinity(0)) - torch.get_num_threads()) / torch.get_num_threads(), 1.0)


def _plans(
    drafter: Drafter, model: PreTrainedModel, config: SpeculativeConfig, capacity: int, length: int
) -> "RequestPlans[int] | None":
    """The plans of requests, which begin as the machine's; None: there is no profile, or no acceptance of an earlier
    call, to predict by."""
    acceptance = Session.of(model).acceptance.get(drafter.strategy)
    if acceptance is None:
        return None
    profile = find_profile(model, replace(config, sd_toggle="measured"), capacity, length)  # profiles nothing
    if profile is None:
        return None
    plans: RequestPlans[int] = load("specactor.reconfiguration").request_plans(
        drafter, profile, config, acceptance, capacity, length, _drafting_share()
    )
    return plans
