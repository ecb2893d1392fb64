"""SA Algorithms 1 and 2 against brute force, and their model of time against a simulated drafter and verifier."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_trl.scheduling.acceptance import MAX_DRAFT_LENGTH
from spec_trl.scheduling.affine_seconds import AffineSeconds
from spec_trl.specactor.decoupled_plan import ExecutionPlan, best_decoupled_window, execution_plan
from spec_trl.specactor.reconfiguration import RequestPlan, reconfigured
from spec_trl.specactor.token_speed import (
    DraftSeconds,
    VerifySeconds,
    decoupled_speed,
    printed_decoupled_speed,
    replicated,
)


def cluster(seed: int) -> tuple[DraftSeconds, VerifySeconds, float, int, int, list[int]]:
    """A drafter, a verifier whose time grows with positions and falls with GPUs, p, B, G and 𝔾."""
    draw = random.Random(seed)
    drafter = AffineSeconds(10 ** draw.uniform(-6, -3), 10 ** draw.uniform(-4, -2))
    slope, extra, base = 10 ** draw.uniform(-6, -3), draw.uniform(0, 1), 10 ** draw.uniform(-3, -1)

    def verify(gpus: int, positions: int) -> AffineSeconds:
        return AffineSeconds(slope * (1 + extra * (positions - 1)) / gpus, base / gpus**0.7)

    gpus = draw.choice([4, 8, 32, 512])
    return replicated(drafter), verify, draw.random(), draw.randint(1, 64) * gpus, gpus, [1, 2, 4]


def test_plans_are_those_of_brute_force() -> None:
    """Each g_v, g_d, mode and window up to 64 is tried, by formulas of the test's own."""
    w = np.arange(1, MAX_DRAFT_LENGTH + 1)
    for seed in range(1000):
        draft, verify, p, requests, gpus, sizes = cluster(seed)
        printed, best = seed % 2 == 0, 0.0
        tokens, full = (1 - p**w) / (1 - p), p**w
        for g_v in (size for size in sizes if size <= gpus):
            batch = -(-requests // (gpus // g_v))
            seconds = np.array([verify(g_v, positions)(batch) for positions in range(1, MAX_DRAFT_LENGTH + 2)])
            best = max(best, 1 / seconds[0], *((1 + p * tokens) / (w * draft(1)(batch) + seconds[1:])))
            for g_d in range(1, min(g_v, gpus - g_v) + 1):
                batch = -(-requests // (gpus // (g_d + g_v)))
                drafting = w * draft(g_d)(batch)
                verifying = np.array([verify(g_v, positions)(batch) for positions in w.tolist()])
                period = np.maximum(drafting, verifying)
                per_period = (tokens + w * full) / 2 if printed else tokens / (2 - full)
                speeds = per_period / period
                best = max(best, *speeds)
        speed = printed_decoupled_speed if printed else decoupled_speed
        plan = execution_plan(requests, gpus, sizes, p, draft, verify, speed)
        assert plan.tokens_per_second == pytest.approx(best, rel=1e-9), seed
        assert plan.batch == -(-requests // (gpus // (plan.draft_gpus + plan.verify_gpus)))


def test_512_gpus_take_less_than_50000_evaluations() -> None:
    draft, verify, *_ = cluster(0)
    calls = 0

    def counted(gpus: int, positions: int) -> AffineSeconds:
        nonlocal calls
        calls += 1
        return verify(gpus, positions)

    execution_plan(65536, 512, [1, 2, 4, 8, 16, 32, 64], 0.8, draft, counted)
    assert calls < 50_000


def test_the_printed_bound_of_windows_leaves_the_best_one_out() -> None:
    """w_max = max(⌈V'/D'⌉, ⌈β/α⌉) of Algorithm 1, line 5, is 4 by V of one position; V grows with w, and the best
    window with it."""
    draft = AffineSeconds(1e-3, 1e-3)
    window, _ = best_decoupled_window(0.99, 8, draft, lambda w: AffineSeconds(4e-3 * (1 + 0.1 * (w - 1)), 4e-3))
    assert window > 4


def simulated_speed(p: float, window: int, draft: float, verify: float, *, seed: int) -> float:
    """Tokens per second of a request among others that set the pace: it is verified in each period in which a window
    of its drafts is there, and drafts the next one meanwhile, anew where the last one was refused."""
    chance = random.Random(seed)
    periods, tokens, is_ready = 20_000, 0, False
    for _ in range(periods):
        accepted = next((k for k in range(window) if chance.random() >= p), window) if is_ready else window
        tokens += min(accepted + 1, window) if is_ready else 0
        is_ready = accepted == window  # what was drafted meanwhile goes on from there
    return tokens / (periods * max(window * draft, verify))


@pytest.mark.parametrize(("p", "window", "draft"), [(0.9, 5, 0.1), (0.5, 3, 0.5), (0.97, 8, 0.3), (0.0, 2, 0.2)])
def test_decoupled_speed_is_that_of_a_simulated_pair(p: float, window: int, draft: float) -> None:
    assert decoupled_speed(p, window, draft, 1.0) == pytest.approx(
        simulated_speed(p, window, draft, 1.0, seed=window), rel=0.02
    )


@given(p=st.floats(0, 1), window=st.integers(1, 64))
def test_the_printed_model_flatters(p: float, window: int) -> None:
    """By up to 29 %."""
    exact = decoupled_speed(p, window, 1.0, 5.0)
    printed = printed_decoupled_speed(p, window, 1.0, 5.0)
    assert exact * (1 - 1e-9) <= printed <= 1.3 * exact


def test_low_acceptance_leaves_the_groups_plan() -> None:
    """The better half keeps the plan; a request whose drafts fail gets a shorter window, then another mode."""
    draft, verify = replicated(AffineSeconds(0.0, 0.1)), lambda gpus, positions: AffineSeconds(0.01 * positions, 1.0)
    plan = ExecutionPlan("decoupled", 1, 4, 9, 64, 0.0)
    plans = reconfigured({"good": 0.95, "same": 0.93, "fair": 0.6, "none": 0.0}, plan, draft, verify)
    assert plans["good"] == plans["same"] == RequestPlan("decoupled", 9)
    assert plans["fair"].window not in (0, 9)
    assert plans["none"] == RequestPlan("plain", 0)
    coupled = ExecutionPlan("coupled", 0, 4, 9, 64, 0.0)
    assert {plan.mode for plan in reconfigured({1: 0.9, 2: 0.7, 3: 0.0}, coupled, draft, verify).values()} == {
        "coupled", "plain",
    }  # fmt: skip
    assert reconfigured({}, plan, draft, verify) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "requests=0"),
        ({"acceptance": 1.5}, "acceptance=1.5"),
        ({"verify_gpus": [8]}, r"verify_gpus=\[8\]"),
        ({"modes": ["decoupled"], "gpus": 1}, "no plan fits"),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    arguments = {
        "requests": 64, "gpus": 4, "verify_gpus": [1], "acceptance": 0.5,
        "draft": replicated(AffineSeconds(0, 1)), "verify": lambda gpus, positions: AffineSeconds(0, 1),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        execution_plan(**{**arguments, **changes})  # type: ignore[arg-type]
    for numbers in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="per_request="):
            AffineSeconds(*numbers)
