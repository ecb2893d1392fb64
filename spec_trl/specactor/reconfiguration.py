"""SA Algorithm 2: requests of low acceptance get a window and a mode of their own."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar

from .decoupled_plan import ExecutionPlan, Mode, SpeedModel, best_coupled_window, best_decoupled_window
from .token_speed import (
    DraftSeconds,
    VerifySeconds,
    alternating_speed,
    busy_alternating_speed,
    busy_decoupled_speed,
    coupled_speed,
    decoupled_speed,
)


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
    speed: SpeedModel = decoupled_speed,
    waits: SpeedModel = alternating_speed,
) -> dict[Request, RequestPlan]:
    """The plan of each request: the group's own from the mean acceptance upwards, the fastest for it below the mean.

    Args:
        acceptance: p of each request, 0 to 1.
        plan: the group's, from :func:`~.decoupled_plan.execution_plan`.
        draft: D of g_d.
        verify: V of (g_v, positions).
        batch: b at which forwards are timed. The paper takes 1, as if the request had its workers for itself.
        speed: the model of decoupled execution.
        waits: the model of a request that waits for its verification among others that do not.
    """
    mean = sum(acceptance.values()) / len(acceptance) if acceptance else 0.0
    own = RequestPlan(plan.mode, plan.window)
    drafter, verifier = draft(plan.draft_gpus or 1), partial(verify, plan.verify_gpus)

    @cache
    def fastest(p: float) -> RequestPlan:
        choices: list[tuple[float, Mode, int]] = [(1.0 / verifier(1)(batch), "plain", 0)]
        if plan.mode == "decoupled":
            window, tgs = best_decoupled_window(p, batch, drafter, verifier, speed)
            choices.append((tgs, "decoupled", window))
        model = waits if plan.mode == "decoupled" else coupled_speed
        window, tgs = best_coupled_window(p, batch, drafter, verifier, model)
        choices.append((tgs, "coupled", window))
        return RequestPlan(*max(choices)[1:])

    return {request: fastest(p) if p < mean else own for request, p in acceptance.items()}


@dataclass
class _Count:
    """What one request did."""

    tokens: int = 0  # generated
    judged: int = 0  # drafts of which the target said whether they are right
    right: int = 0
    looks: int = 0  # at its plan


class RequestPlans(Generic[Request]):
    """The plan of each request of a running group, decided anew after every 1000 tokens of its own.

    Args:
        plan: the group's, kept as `group`.
        draft: D of g_d.
        verify: V of (g_v, positions).
        every: tokens of a request between two looks at its plan.
    """

    def __init__(
        self, plan: ExecutionPlan, draft: DraftSeconds, verify: VerifySeconds, every: int = RECONFIGURATION_TOKENS
    ) -> None:
        self.group, self._draft, self._verify, self._every = plan, draft, verify, every
        self.begin()

    def begin(self) -> None:
        """A rollout starts; all requests have the group's plan."""
        self._counts: dict[Request, _Count] = {}
        self._own: dict[Request, RequestPlan] = {}

    def of(self, request: Request) -> RequestPlan:
        """The present plan of `request`."""
        return self._own.get(request, RequestPlan(self.group.mode, self.group.window))

    def record(
        self, requests: Sequence[Request], tokens: Sequence[int], judged: Sequence[int], right: Sequence[int]
    ) -> None:
        """Takes what one round did for each of the `requests` in flight: tokens committed, drafts judged, and how many
        of these were right."""
        is_due = False
        for request, *done in zip(requests, tokens, judged, right, strict=True):
            own = self._counts.setdefault(request, _Count())
            own.tokens, own.judged, own.right = own.tokens + done[0], own.judged + done[1], own.right + done[2]
            is_due |= own.tokens // self._every > own.looks
        if not is_due:
            return
        plans = reconfigured(  # those that have ended count for the mean: the tail is to be compared with the batch
            {request: own.right / own.judged for request, own in self._counts.items() if own.judged},
            self.group, self._draft, self._verify, len(requests), busy_decoupled_speed, busy_alternating_speed,
        )  # fmt: skip
        for request in requests:
            own = self._counts[request]
            if own.tokens // self._every > own.looks:
                own.looks = own.tokens // self._every
                self._own[request] = plans.get(request, self.of(request))
