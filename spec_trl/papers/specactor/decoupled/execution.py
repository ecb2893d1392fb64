"""Which drafters of a call run decoupled (SA §4.1), by the acceptance of earlier calls."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ....generation.call import Call
from ....generation.engine.drafter import Drafter
from ....generation.engine.statistics import SpeculationStatistics
from ....generation.measuring import find_profile
from ....generation.options import SpeculativeConfig
from ....generation.session import Session
from ..reconfiguration import RequestPlans, request_plans
from .decoupled_drafter import DecoupledDrafter
from .pipe import DraftThread, idle_cores


def decoupled(drafters: list[Drafter], call: Call, rows: int) -> list[Drafter]:
    """Returns the `drafters` of `call`, with at most `rows` rows in flight; those that run decoupled get a thread.
    Raises ValueError if one must run decoupled and cannot."""
    model, config = call.model, call.config
    if call.images:
        return drafters
    if config.specactor.decoupled_execution == "always":
        return [
            drafter
            if isinstance(drafter, DecoupledDrafter)
            else DecoupledDrafter(DraftThread(drafter), _plans(drafter, model, config, rows, call.longest))
            for drafter in drafters
        ]
    # A thread would share a GPU with the target: only idle CPU cores are a second worker.
    is_open = model.device.type == "cpu" and _drafting_share() > 0
    if is_open and len(drafters) == 1 and drafters[0].drafts_ahead and not call.rejects:
        plans = _plans(drafters[0], model, config, rows, call.longest)
        if plans is not None and plans.group.mode == "decoupled":
            return [DecoupledDrafter(DraftThread(drafters[0]), plans)]
    return drafters


def keep_acceptance(session: Session, drafters: Sequence[Drafter], statistics: SpeculationStatistics) -> None:
    """Stores the acceptance of first drafts, by which later calls plan decoupled execution."""
    for drafter in drafters:
        acceptance = statistics.per_drafter[drafter.strategy].first_token_acceptance
        if not math.isnan(acceptance):
            session.acceptance[drafter.strategy] = acceptance


def _drafting_share() -> float:
    """Cores of the drafter's thread over those that a profile was measured with, at most 1."""
    return min(idle_cores() / torch.get_num_threads(), 1.0)


def _plans(
    drafter: Drafter, model: PreTrainedModel, config: SpeculativeConfig, capacity: int, length: int
) -> RequestPlans[int] | None:
    """Returns the plans of requests, which begin as the machine's; None without a profile or an earlier call's
    acceptance."""
    acceptance = Session.of(model).acceptance.get(drafter.strategy)
    if acceptance is None:
        return None
    profile = find_profile(model, replace(config, sd_toggle="measured"), capacity, length)  # profiles nothing
    if profile is None:
        return None
    return request_plans(drafter, profile, config, acceptance, capacity, length, _drafting_share())
