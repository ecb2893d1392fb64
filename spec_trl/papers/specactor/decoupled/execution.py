"""Which drafters of a call run decoupled (SA §4.1), by the acceptance of earlier calls."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ....generation.call import Call
from ....generation.engine.drafter import Drafter
from ....generation.engine.statistics import SpeculationStatistics
from ....generation.measuring import find_profile
from ....generation.session import Session
from ...efficient_rollout.profile import roofline_of
from ..decoupled_plan import plan_of_machine
from ..reconfiguration import RequestPlans, affine_times
from .decoupled_drafter import DecoupledDrafter
from .pipe import DraftThread, idle_cores


def decoupled(drafters: list[Drafter], call: Call, rows: int) -> list[Drafter]:
    """Returns the `drafters` of `call`, with at most `rows` rows in flight; those that run decoupled get a thread.
    Raises ValueError if one must run decoupled and cannot."""
    if call.media:
        return drafters
    if call.config.specactor.decoupled_execution == "always":
        return [
            one if one.beside else DecoupledDrafter(DraftThread(one), _plans(one, call, rows)) for one in drafters
        ]
    # A thread would share a GPU with the target: only idle CPU cores are a second worker.
    is_open = call.model.device.type == "cpu" and idle_cores() > 0
    if is_open and len(drafters) == 1 and drafters[0].drafts_ahead and not call.rejects:
        plans = _plans(drafters[0], call, rows)
        if plans is not None and plans.group.mode == "decoupled":
            return [DecoupledDrafter(DraftThread(drafters[0]), plans)]
    return drafters


def keep_acceptance(session: Session, drafters: Sequence[Drafter], statistics: SpeculationStatistics) -> None:
    """Stores the acceptance of first drafts, by which later calls plan decoupled execution."""
    for drafter in drafters:
        acceptance = statistics.per_drafter[drafter.strategy].first_token_acceptance
        if not math.isnan(acceptance):
            session.acceptance[drafter.strategy] = acceptance


def _plans(drafter: Drafter, call: Call, rows: int) -> RequestPlans[int] | None:
    """Returns the plans of requests, which begin as the machine's, by its roofline; None without a profile or an
    earlier call's acceptance."""
    model, config = call.model, call.config
    acceptance = Session.of(model).acceptance.get(drafter.strategy)
    if acceptance is None:
        return None
    profile = find_profile(model, replace(config, sd_toggle="measured"), rows, call.longest)  # profiles nothing
    if profile is None:
        return None
    # Cores of the drafter's thread over those that the profile was measured with.
    share, roofline = min(idle_cores() / torch.get_num_threads(), 1.0), roofline_of(drafter, profile)
    draft, verify = affine_times(roofline, rows, call.longest / 2, share if share > 0 else 1.0)
    alone, _ = affine_times(roofline, rows, call.longest / 2)
    plan = plan_of_machine(acceptance, config.first_draft_length, rows, alone(1), draft(1), partial(verify, 1))
    if config.specactor.decoupled_execution == "always":
        plan = replace(plan, mode="decoupled", window=config.first_draft_length + 1)
    return RequestPlans(plan, draft, verify)
