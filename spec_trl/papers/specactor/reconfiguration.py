"""Gives requests of low acceptance a separate window and mode (SA Algorithm 2)."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar

from ...generation.planner.clock import AffineSeconds, fit_affine
from ..efficient_rollout.roofline import Roofline
from .decoupled_plan import ExecutionPlan, Mode, SpeedModel, best_window
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
"""A request's plan is decided again after this many tokens (SA §4.1): over fewer tokens acceptance changes sharply,
and every change of plan costs a rollback."""


class RequestPlan(NamedTuple):
    """Execution of one request of a group."""

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
    """The plan of every request: the group's from the mean acceptance upwards, else the fastest for the request.

    Args:
        acceptance: p by request, 0 to 1.
        plan: the group's, from :func:`~.decoupled_plan.execution_plan`.
        draft: D of g_d.
        verify: V of (g_v, positions).
        batch: b of timed forwards. The paper takes 1, as if the request had its workers for itself.
        speed: the model of decoupled execution.
        waits: the model of a request that waits for its verification while other requests do not.
    """
    mean = sum(acceptance.values()) / len(acceptance) if acceptance else 0.0
    drafter, verifier = draft(plan.draft_gpus or 1), partial(verify, plan.verify_gpus)

    @cache
    def fastest(p: float) -> RequestPlan:
        choices: list[tuple[float, Mode, int]] = [(1.0 / verifier(1)(batch), "plain", 0)]
        if plan.mode == "decoupled":
            window, tgs = best_window(p, batch, drafter, verifier, speed)
            choices.append((tgs, "decoupled", window))
        model = waits if plan.mode == "decoupled" else coupled_speed
        window, tgs = best_window(p, batch, drafter, verifier, model, bonus=1)
        choices.append((tgs, "coupled", window))
        return RequestPlan(*max(choices)[1:])

    group = RequestPlan(plan.mode, plan.window)
    return {request: fastest(p) if p < mean else group for request, p in acceptance.items()}


@dataclass
class _Counts:
    plan: RequestPlan
    tokens: int = 0  # generated
    judged: int = 0  # drafts that the target judged
    right: int = 0
    decisions: int = 0  # about its plan


class RequestPlans(Generic[Request]):
    """Plans of the requests of a running group, decided again after every 1000 tokens of a request.

    Args:
        plan: of the group, also of new requests; the attribute `group`.
        draft: D of g_d.
        verify: V of (g_v, positions).
        every: tokens of a request between two decisions.
    """

    def __init__(
        self, plan: ExecutionPlan, draft: DraftSeconds, verify: VerifySeconds, every: int = RECONFIGURATION_TOKENS
    ) -> None:
        self.group, self._draft, self._verify, self._every = plan, draft, verify, every
        self.begin()

    def begin(self) -> None:
        self._counts: dict[Request, _Counts] = {}

    def of(self, request: Request) -> RequestPlan:
        return self._counts_of(request).plan

    def record(
        self, requests: Sequence[Request], tokens: Sequence[int], judged: Sequence[int], right: Sequence[int]
    ) -> None:
        """Records a round for the `requests` in flight: committed tokens, judged drafts, and accepted drafts."""
        counts = [self._counts_of(request) for request in requests]
        for count, *done in zip(counts, tokens, judged, right, strict=True):
            count.tokens, count.judged, count.right = (
                count.tokens + done[0], count.judged + done[1], count.right + done[2],
            )  # fmt: skip
        due = [count.tokens // self._every > count.decisions for count in counts]
        if not any(due):
            return
        plans = reconfigured(  # ended requests count in the mean: the tail is compared with the batch
            {request: count.right / count.judged for request, count in self._counts.items() if count.judged},
            self.group, self._draft, self._verify, len(requests), busy_decoupled_speed, busy_alternating_speed,
        )  # fmt: skip
        for request, count, is_due in zip(requests, counts, due, strict=True):
            if is_due:
                count.decisions = count.tokens // self._every
                count.plan = plans.get(request, count.plan)

    def _counts_of(self, request: Request) -> _Counts:
        if request not in self._counts:
            self._counts[request] = _Counts(RequestPlan(self.group.mode, self.group.window))
        return self._counts[request]


def affine_times(
    roofline: Roofline, largest_batch: int, length: float, draft_share: float = 1.0
) -> tuple[DraftSeconds, VerifySeconds]:
    """D and V as lines through the roofline's times of the batches 1, 2, 4, ... up to `largest_batch`.

    Args:
        roofline: of the target and the drafter on this machine.
        largest_batch: rows that a rollout begins with.
        length: mean cached tokens of a row.
        draft_share: share of the profiled compute that the drafter has when it runs next to the target.
    """
    batches = sorted({largest_batch, *(1 << power for power in range(largest_batch.bit_length()))})

    @cache
    def draft(gpus: int) -> AffineSeconds:
        return fit_affine([(batch, roofline.draft_seconds(batch, length) / draft_share, 1.0) for batch in batches])

    @cache
    def verify(gpus: int, positions: int) -> AffineSeconds:
        return fit_affine([(batch, roofline.verify_seconds(batch, length, positions - 1), 1.0) for batch in batches])

    return draft, verify
