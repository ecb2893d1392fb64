"""SA Algorithm 1 and the plan of a machine against brute force; models of time against a simulated pair."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_trl.generation.planner.acceptance import MAX_DRAFT_LENGTH
from spec_trl.generation.planner.clock import AffineSeconds
from spec_trl.papers.specactor.decoupled_plan import best_window, execution_plan, plan_of_machine
from spec_trl.papers.specactor.token_speed import (
    DraftSeconds,
    VerifySeconds,
    busy_alternating_speed,
    busy_decoupled_speed,
    busy_window_tokens,
    coupled_speed,
    decoupled_speed,
    printed_window_tokens,
    replicated,
    window_tokens,
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
    for seed in range(400):
        draft, verify, p, requests, gpus, sizes = cluster(seed)
        best = 0.0
        tokens, full = (1 - p**w) / (1 - p), p**w
        for g_v in (size for size in sizes if size <= gpus):
            batch = -(-requests // (gpus // g_v))
            seconds = np.array([verify(g_v, positions)(batch) for positions in range(1, MAX_DRAFT_LENGTH + 2)])
            best = max(best, 1 / seconds[0], *((1 + p * tokens) / (w * draft(1)(batch) + seconds[1:])))
            for g_d in range(1, min(g_v, gpus - g_v) + 1):
                batch = -(-requests // (gpus // (g_d + g_v)))
                verifying = np.array([verify(g_v, positions)(batch) for positions in w.tolist()])
                period = np.maximum(w * draft(g_d)(batch), verifying)
                best = max(best, *(tokens / (2 - full) / period))
        plan = execution_plan(requests, gpus, sizes, p, draft, verify)
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
    verify = lambda w: AffineSeconds(4e-3 * (1 + 0.1 * (w - 1)), 4e-3)  # noqa: E731
    window, _ = best_window(0.99, 8, draft, verify, decoupled_speed)
    assert window > 4


def simulated_tokens(p: float, window: int, rule: str) -> float:
    """Tokens per period of a row whose drafts, where there are some, are verified in each.

    In the paper the row "waits" while drafts are refused and drafted anew. In this engine it decodes a token then and
    is "busy"; a row that is "alternating" drafts only where nothing of it waits for verification.
    """
    chance, tokens, ahead, periods = random.Random(window), 0, 0, 30_000
    for _ in range(periods):
        accepted = next((k for k in range(ahead) if chance.random() >= p), ahead)
        if rule == "waits":
            tokens += min(accepted + 1, window) if ahead else 0
            ahead = window if accepted == ahead else 0  # what was drafted meanwhile goes on from there
            continue
        drafts = 0 if rule == "alternating" and ahead else window
        tokens += accepted + 1
        goes_on = accepted == ahead and drafts > 0 and chance.random() < p
        ahead = drafts - 1 if goes_on else 0
    return tokens / periods


@pytest.mark.parametrize(("p", "window"), [(0.5, 3), (0.9, 5), (0.97, 8), (0.0, 2), (1.0, 4), (0.7, 1)])
def test_tokens_per_period_are_those_of_a_simulated_row(p: float, window: int) -> None:
    """And so are speeds in which drafting, or verifying, sets the pace."""
    assert window_tokens(p, window) == pytest.approx(simulated_tokens(p, window, "waits"), rel=0.03)
    busy = busy_window_tokens(p, window)
    assert busy == pytest.approx(simulated_tokens(p, window, "busy"), rel=0.02)
    waiting = busy_alternating_speed(p, window - 1, 1.0, float(window))
    assert waiting * window == pytest.approx(simulated_tokens(p, window, "alternating"), rel=0.02)
    assert decoupled_speed(p, window, 0.1, 5.0) * 5.0 == pytest.approx(window_tokens(p, window))
    assert busy_decoupled_speed(p, window, 2.0, 1.0) * 2.0 * window == pytest.approx(busy)


def test_the_figures_in_the_docs() -> None:
    assert round(busy_window_tokens(0.5, 3), 2) == 1.27
    assert round(window_tokens(0.5, 3), 2) == 0.93


@given(p=st.floats(0, 1), window=st.integers(1, 64))
def test_models_are_ordered(p: float, window: int) -> None:
    """The printed one is above the exact one by up to 29 %; a verifier that is never idle is never slower."""
    exact = window_tokens(p, window)
    assert exact * (1 - 1e-9) <= printed_window_tokens(p, window) <= 1.3 * exact
    assert busy_window_tokens(p, window) >= max(exact, 1.0) - 1e-9


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
