"""SA Algorithm 2, the plans of a running group, and D and V as lines through what a roofline predicts."""

from typing import Any

import pytest

from spec_trl.generation.planner.clock import AffineSeconds
from spec_trl.generation.planner.model_constants import ModelConstants
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.specactor.decoupled_plan import ExecutionPlan
from spec_trl.papers.specactor.reconfiguration import RequestPlan, RequestPlans, affine_times, reconfigured
from spec_trl.papers.specactor.token_speed import replicated


DRAFT, VERIFY = replicated(AffineSeconds(0.0, 0.1)), lambda gpus, positions: AffineSeconds(0.01 * positions, 1.0)


def test_times_of_a_roofline_that_is_a_line() -> None:
    """All of its time is overhead; verification has one per row and one per forward."""
    constants = ModelConstants("tiny", 1.0, 1.0, 1.0, 0.0, 0.0)
    coefficients = Coefficients(1e15, 1e15, 1.0, 1.0, 1e-3, 2e-3, 3e-3, t_T=0.1, t_D=0.2, t_V=0.3)
    draft, verify = affine_times(Roofline(constants, coefficients), 24, 100.0, draft_share=0.5)
    assert (draft(1).per_request, draft(1).fixed) == pytest.approx((2 * 2e-3, 2 * 0.2))
    assert (verify(1, 5).per_request, verify(1, 5).fixed) == pytest.approx((3e-3, 0.3))


def test_low_acceptance_leaves_the_groups_plan() -> None:
    """The better half keeps the plan; a request whose drafts fail gets a shorter window, then another mode."""
    plan = ExecutionPlan("decoupled", 1, 4, 9, 64, 0.0)
    plans = reconfigured({"good": 0.95, "same": 0.93, "fair": 0.6, "none": 0.0}, plan, DRAFT, VERIFY)
    assert plans["good"] == plans["same"] == RequestPlan("decoupled", 9)
    assert plans["fair"].window not in (0, 9)
    assert plans["none"] == RequestPlan("plain", 0)
    coupled = ExecutionPlan("coupled", 0, 4, 9, 64, 0.0)
    assert {plan.mode for plan in reconfigured({1: 0.9, 2: 0.7, 3: 0.0}, coupled, DRAFT, VERIFY).values()} == {
        "coupled", "plain",
    }  # fmt: skip
    assert reconfigured({}, plan, DRAFT, VERIFY) == {}


def plans(**options: Any) -> RequestPlans[str]:
    return RequestPlans(ExecutionPlan("decoupled", 1, 1, 9, 8, 0.0), DRAFT, VERIFY, **options)


def test_a_plan_changes_after_a_thousand_tokens_of_its_request_alone() -> None:
    own = plans()
    for _ in range(99):
        own.record(["good", "bad", "late"], [10, 10, 1], [10, 10, 1], [10, 0, 0])
    assert [own.of(request).mode for request in ("good", "bad", "late")] == ["decoupled"] * 3
    own.record(["good", "bad", "late"], [10, 10, 1], [10, 10, 1], [10, 0, 0])
    assert own.of("good") == own.of("late") == RequestPlan("decoupled", 9)
    assert own.of("bad") == RequestPlan("plain", 0)
    own.begin()
    assert own.of("bad") == RequestPlan("decoupled", 9)


def test_the_tail_is_compared_with_the_batch() -> None:
    """Requests that have ended count for the mean, and one without drafts keeps its plan."""
    own = plans(every=10)
    own.record(["good", "bad", "none"], [9, 9, 9], [9, 9, 0], [9, 0, 0])
    own.record(["bad", "none"], [1, 1], [1, 0], [0, 0])  # the good one has ended
    assert own.of("bad").mode == "plain" and own.of("none") == RequestPlan("decoupled", 9)
