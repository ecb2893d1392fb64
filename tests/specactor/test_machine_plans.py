"""D and V as lines through what a roofline predicts, the plan of one machine, and how this engine's rule paces it."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_trl.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.scheduling.affine_seconds import AffineSeconds
from spec_trl.scheduling.model_constants import ModelConstants
from spec_trl.specactor.decoupled_plan import ExecutionPlan, plan_of_machine
from spec_trl.specactor.machine_plans import affine_times
from spec_trl.specactor.reconfiguration import RequestPlan, RequestPlans
from spec_trl.specactor.token_speed import (
    busy_alternating_speed,
    busy_decoupled_speed,
    busy_window_tokens,
    coupled_speed,
    replicated,
    window_tokens,
)


def test_times_of_a_roofline_that_is_a_line() -> None:
    """All of its time is overhead; verification has one per row and one per forward."""
    constants = ModelConstants("tiny", 1.0, 1.0, 1.0, 0.0, 0.0)
    coefficients = Coefficients(1e15, 1e15, 1.0, 1.0, 1e-3, 2e-3, 3e-3, t_T=0.1, t_D=0.2, t_V=0.3)
    draft, verify = affine_times(Roofline(constants, coefficients), 24, 100.0, draft_share=0.5)
    assert (draft(1).per_request, draft(1).fixed) == pytest.approx((2 * 2e-3, 2 * 0.2))
    assert (verify(1, 5).per_request, verify(1, 5).fixed) == pytest.approx((3e-3, 0.3))


# ---- the engine's rule ---------------------------------------------------------------------------------------------


def simulated_tokens(p: float, window: int, waits: bool) -> float:
    """Tokens per period of a row whose drafts are verified, or which decodes one token, in every period."""
    chance, tokens, ahead, periods = random.Random(window), 0, 0, 40_000
    for _ in range(periods):
        drafts = 0 if waits and ahead else window
        accepted = next((k for k in range(ahead) if chance.random() >= p), ahead)
        tokens += accepted + 1
        goes_on = accepted == ahead and drafts > 0 and chance.random() < p
        ahead = drafts - 1 if goes_on else 0
    return tokens / periods


@pytest.mark.parametrize(("p", "window"), [(0.5, 3), (0.9, 5), (0.97, 8), (0.0, 2), (1.0, 4), (0.7, 1)])
def test_tokens_per_period_are_those_of_a_simulated_row(p: float, window: int) -> None:
    assert busy_window_tokens(p, window) == pytest.approx(simulated_tokens(p, window, False), rel=0.02)
    waiting = busy_alternating_speed(p, window - 1, 1.0, float(window))
    assert waiting * window == pytest.approx(simulated_tokens(p, window, True), rel=0.02)


def test_the_figures_in_the_docs() -> None:
    assert round(busy_window_tokens(0.5, 3), 2) == 1.27
    assert round(window_tokens(0.5, 3), 2) == 0.93


@given(p=st.floats(0, 1), window=st.integers(1, 64))
def test_a_verifier_that_is_never_idle_is_never_slower(p: float, window: int) -> None:
    assert busy_window_tokens(p, window) >= max(window_tokens(p, window), 1.0) - 1e-9


def test_the_plan_of_a_machine_is_its_fastest_mode() -> None:
    modes = set()
    for seed in range(300):
        draw = random.Random(seed)
        p, gamma, batch = draw.random(), draw.randint(1, 12), draw.randint(1, 64)
        alone = AffineSeconds(10 ** draw.uniform(-6, -3), 10 ** draw.uniform(-4, -1))
        beside = AffineSeconds(alone.per_request * 1.5, alone.fixed * 1.5)

        def verify(positions: int) -> AffineSeconds:
            return AffineSeconds(1e-5 * positions, 1e-2)

        seconds = verify(gamma + 1)(batch)
        speeds = {
            "plain": 1 / verify(1)(batch),
            "coupled": coupled_speed(p, gamma, alone(batch), seconds),
            "decoupled": busy_decoupled_speed(p, gamma + 1, beside(batch), seconds),
        }
        plan = plan_of_machine(p, gamma, batch, alone, beside, verify)
        assert plan.mode == max(speeds, key=lambda mode: speeds[mode])
        assert plan.tokens_per_second == speeds[plan.mode]
        assert plan.window == {"plain": 0, "coupled": gamma, "decoupled": gamma + 1}[plan.mode]
        modes.add(plan.mode)
    assert modes == {"plain", "coupled", "decoupled"}


# ---- the plans of requests -----------------------------------------------------------------------------------------


def plans(**options: Any) -> RequestPlans[str]:
    draft = replicated(AffineSeconds(0.0, 0.1))
    group = ExecutionPlan("decoupled", 1, 1, 9, 8, 0.0)
    return RequestPlans(group, draft, lambda _, positions: AffineSeconds(0.01 * positions, 1.0), **options)


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
    own = plans(every=10)
    own.record(["good", "bad"], [9, 9], [9, 9], [9, 0])
    own.record(["bad"], [1], [1], [0])  # the good one has ended
    assert own.of("bad").mode == "plain"


def test_a_request_without_drafts_keeps_its_plan() -> None:
    own = plans(every=10)
    own.record(["none", "bad"], [10, 10], [0, 10], [0, 0])
    assert own.of("none") == RequestPlan("decoupled", 9)
