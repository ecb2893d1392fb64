"""SA Algorithm 2: requests of low acceptance get a window and a mode of their own."""

from collections.abc import Hashable, Mapping
from functools import cache, partial
from typing import NamedTuple, TypeVar

from .decoupled_plan import ExecutionPlan, Mode, best_coupled_window, best_decoupled_window
from .token_speed import DraftSeconds, VerifySeconds, alternating_speed, coupled_speed


Request = TypeVar("Request", bound=Hashable)

RECONFIGURATION_TOKENS = 1000
"""A request is looked at again after it has generated this many tokens (SA §4.1): acceptance changes sharply over
fewer, and each change costs a rollback."""


class RequestPlan(NamedTuple):
    """How one request of a group is executed."""

    mode: Mode
    window: int  # w, 0 for plain decoding


def reconfigured(
    acceptance: Mapping[Request, float],
    plan: ExecutionPlan,
    draft: DraftSeconds,
    verify: VerifySeconds,
    batch: int = 1,
) -> dict[Request, RequestPlan]:
    """The plan of each request: the group's own from the mean acceptance upwards, the fastest for it below the mean.

    Args:
        acceptance: p of each request, 0 to 1.
        plan: the group's, from :func:`~.decoupled_plan.execution_plan`.
        draft: D of g_d.
        verify: V of (g_v, positions).
        batch: b at which forwards are timed. The paper takes 1, as if the request had its workers for itself.
    """
    mean = sum(acceptance.values()) / len(acceptance) if acceptance else 0.0
    own = RequestPlan(plan.mode, plan.window)
    drafter, verifier = draft(plan.draft_gpus or 1), partial(verify, plan.verify_gpus)

    @cache
    def fastest(p: float) -> RequestPlan:
        choices: list[tuple[float, Mode, int]] = [(1.0 / verifier(1)(batch), "plain", 0)]
        if plan.mode == "decoupled":
            window, tgs = best_decoupled_window(p, batch, drafter, verifier)
            choices.append((tgs, "decoupled", window))
        waits = alternating_speed if plan.mode == "decoupled" else coupled_speed
        window, tgs = best_coupled_window(p, batch, drafter, verifier, waits)
        choices.append((tgs, "coupled", window))
        return RequestPlan(*max(choices)[1:])

    return {request: fastest(p) if p < mean else own for request, p in acceptance.items()}
