"""EfficientRollout's π_SD to the letter, and the controls that always or never speculate: decisions, and what they say
of a rollout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from spec_trl.generation.planner.control import AlwaysSpeculate, Candidate, Control, NeverSpeculate, PlainRounds
from spec_trl.generation.planner.model_constants import ModelConstants
from spec_trl.papers.efficient_rollout.profile import RooflineRounds
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.toggle import RooflineToggle


# Qwen2.5-7B on an A100, as published: speculation pays at small batches only.
A100 = Roofline(
    ModelConstants("7b", 15.231e9, 5.443e9, 14.14e9, 401408, 57344),
    Coefficients(F_eff=233.5e12, BW_eff=1.617e12, rho_kappa=0.457, eta_D=1.334, c_T=39e-6, c_D=69e-6, c_V=152e-6),
)
SHRINKING = [64] * 4 + [48] * 3 + [32] * 3 + [16] * 3 + [8] * 3 + [4] * 6 + [1] * 6
LENGTH = 512.0


def predicted(batch: int, length: float = LENGTH) -> float:
    """ER Eq. 3's left side at τ = γ = 5."""
    cycle = 5 * A100.draft_seconds(batch, length) + A100.verify_seconds(batch, length, 5)
    return 5.0 * A100.target_seconds(batch, length) / cycle


def candidate(**changes: Any) -> Candidate:
    return replace(Candidate("self", 5, 5.0, 10_000), **changes)


def toggle(margin: float = 0.05, **changes: Any) -> RooflineToggle:
    return RooflineToggle(candidate(**changes), RooflineRounds(A100, {"self": A100}), margin)


def run(
    control: Control, batches: Sequence[int], waiting: int = 0, slower: float = 1.0, tau: float = 5.0
) -> list[bool]:
    """One rollout, a round per entry, on that machine, but that rounds with drafts are `slower`; in each round so many
    requests wait. Returns which rounds drafted."""
    control.begin(max(batches), [""] * (max(batches) + waiting))
    spoke = []
    for batch in batches:
        (chain,) = control.plan(range(batch), LENGTH, waiting) or [None]
        gamma = 0 if chain is None else chain.draft_length
        seconds = slower * A100.cycle_seconds(batch, LENGTH, gamma) if gamma else A100.target_seconds(batch, LENGTH)
        control.record(gamma, seconds, round(tau * batch) if gamma else batch)
        spoke.append(gamma > 0)
    control.finish()
    return spoke


@pytest.mark.parametrize("margin", [0.0, 0.05, 0.3, 5.0])
def test_it_drafts_where_equation_3_holds(margin: float) -> None:
    assert run(toggle(margin), SHRINKING) == [predicted(batch) >= 1 + margin for batch in SHRINKING]
    assert predicted(64) < 1 < predicted(8)


def test_it_stays_on_while_the_batch_shrinks_and_is_decided_anew_with_refill() -> None:
    batches = [8, 8, 64, 64, 8]
    assert run(toggle(), batches) == [True] * 5  # App. E.4
    assert run(toggle(), batches, waiting=1) == [True, True, False, False, True]
    # Requests that wait count as rows: a small batch is a tail only when nobody waits.
    assert run(toggle(), [64, 8, 8], waiting=100) == [False] * 3


def test_measured_rounds_change_nothing() -> None:
    assert all(run(toggle(), [8] * 60, slower=10.0))


def test_tau_is_that_of_the_last_rollout() -> None:
    control = toggle()
    assert all(run(control, [8] * 10, tau=1.5))
    assert control.candidates[0].block_efficiency == 1.5
    assert not any(run(control, [8] * 10))
    assert control.candidates[0].block_efficiency == 1.5  # it did not draft


@pytest.mark.parametrize(
    ("control", "batches", "prediction", "reason"),
    [
        (toggle(), [64] * 3, predicted(64), f"{predicted(64):.2f}× at 64 rows × 512 tokens: decoding plainly"),
        (
            toggle(margin=5.0), [64] * 2 + [1] * 2, predicted(1),  # the largest prediction of the rollout
            f"{predicted(1):.2f}× at 1 row × 512 tokens: decoding plainly, "
            "since efficient_rollout.margin asks for 6.00×",
        ),
        (toggle(), [8] * 3, predicted(8), f"the roofline predicted {predicted(8):.2f}× in 3 rounds"),
        (AlwaysSpeculate(candidate()), [8] * 3, None, "sd_toggle=always"),
        (NeverSpeculate("sd_toggle=never"), [8] * 3, None, "sd_toggle=never"),
        (NeverSpeculate(), [8] * 3, None, "no drafter"),
    ],
)  # fmt: skip
def test_reasons(control: Control, batches: list[int], prediction: float | None, reason: str) -> None:
    run(control, batches)
    account = control.explain()
    assert account.reason.removeprefix("speculation predicted ") == reason
    assert account.predicted_speedup == (None if prediction is None else pytest.approx(prediction))


@pytest.mark.parametrize("control", [AlwaysSpeculate(candidate(max_rows=16)), toggle(margin=-1, max_rows=16)])
def test_too_many_rows_and_failures(control: Control) -> None:
    assert not any(run(control, [64] * 3))
    expected = "more rows (64) than the drafter's kernels serve (16)"
    assert control.explain().reason == control.forecast(64, LENGTH).reason == expected
    assert all(run(control, [8] * 3)) and control.explain().reason != expected
    control.drop(0)
    assert control.explain().reason == "the drafter failed" and not control.plan(range(8), LENGTH, 0)
    control.begin(8, [""] * 8)  # a new rollout, perhaps a new drafter
    assert control.plan(range(8), LENGTH, 0)[0].draft_length == 5


def test_forecast_before_any_rollout() -> None:
    for batch, decision in ((64, "decoding plainly"), (8, "speculating")):
        forecast, speedup = toggle().forecast(batch, 300.0), predicted(batch, 300.0)
        assert forecast.predicted_speedup == pytest.approx(speedup)
        assert forecast.reason == f"speculation predicted {speedup:.2f}× at {batch} rows × 300 tokens: {decision}"
    assert AlwaysSpeculate(candidate()).forecast(8, LENGTH).reason == "sd_toggle=always"


def test_what_plain_decoding_would_take_and_what_was_gained() -> None:
    rounds, control = [PlainRounds(100, 8, LENGTH)], toggle()
    assert control.plain_seconds(rounds) == pytest.approx(100 * A100.target_seconds(8, LENGTH))
    run(control, [8] * 10, slower=2.0, tau=4.0)
    (tally,) = control.tallies
    assert tally.measured_speedup == pytest.approx(predicted(8) * 4 / 5 / 2)
    assert tally.predicted_speedup == pytest.approx(predicted(8))
    for other in (AlwaysSpeculate(candidate()), NeverSpeculate()):
        assert other.plain_seconds(rounds) is None
