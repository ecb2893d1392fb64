"""Fig. 11: measured points of a sweep and of a run, and how they are counted against the prediction."""

import io

import pytest

from spec_trl.generation.engine.statistics import RoundPoint
from spec_trl.papers.efficient_rollout.commands.boundary import (
    block_efficiency_of_run,
    points_of_run,
    points_of_sweep,
    toggle_boundary,
)
from tests.cli.sample_run import make_profile, make_rollout, make_roofline


def test_sweep_points_are_equation_four() -> None:
    profile = make_profile()
    points = points_of_sweep(profile.samples, float)
    assert len(points) == 7 * 2 * 2
    model = make_roofline()
    for point in points:
        cycle = model.cycle_seconds(point.batch, point.length, point.draft_length)
        if point.batch == 2:
            cycle += 8 * model.verify_seconds(point.batch, point.length, point.draft_length)
        target = model.target_seconds(point.batch, point.length)
        assert point.speedup == pytest.approx(point.draft_length * target / cycle)


def test_run_points_pool_rounds_and_compare_tokens_per_second() -> None:
    first = [
        RoundPoint(4, 500.0, 0, None, 10, 2.0, 40),
        RoundPoint(4, 520.0, 5, "self", 30, 15.0, 160),
        RoundPoint(8, 520.0, 5, "ngram", 30, 15.0, 160),  # of which a profile says nothing
        RoundPoint(64, 60.0, 0, None, 50, 45.0, 3200),
    ]
    second = [
        RoundPoint(4, 510.0, 5, "self", 10, 7.0, 240),
        RoundPoint(2, 900.0, 5, None, 8, 3.2, 64),
        RoundPoint(1, 900.0, 5, "self", 2, 0.8, 8),  # too few rounds
    ]
    records, roofline = [make_rollout(0, points=first), make_rollout(1, points=second)], make_roofline()
    (lone, both), idle = points_of_run(records, roofline)
    assert (both.batch, both.draft_length, both.assumed_baseline) == (4, 5, False)
    assert both.length == pytest.approx((30 * 520 + 10 * 510) / 40)
    assert both.speedup == pytest.approx(400 / (30 * 0.5 + 10 * 0.7) / (40 / 2.0))
    assert lone.assumed_baseline
    assert lone.speedup == pytest.approx((64 / 3.2) / (2 / roofline.target_seconds(2, 900.0)))
    assert idle == [(64, 60.0)]
    assert block_efficiency_of_run(records) == {5: pytest.approx((400 + 64) / (40 * 4 + 8 * 2))}
    # One point is enough for a drawing, and none is not.
    drawing = toggle_boundary(roofline, [lone], {5: 4.0}, idle=idle)
    assert drawing is not None
    assert drawing.text.endswith("; 1 of the points take the autoregressive time from the profile.")
    drawing.figure.savefig(io.BytesIO(), format="png")
    assert toggle_boundary(roofline, [], {5: 4.0}) is None


@pytest.mark.parametrize("scale", [1, 1e-3, 1e3])
def test_counts_and_agreement_by_draft_length(scale: float) -> None:
    """Also where the whole surface lies on one side: without a contour, and the colours need 1 in their range."""
    profile, expected = make_profile(), []
    speedup = profile.roofline.speedup
    for gamma in (3, 7):
        cells = [(b, s) for b in (1, 2, 4, 8, 16, 32, 64) for s in (128, 512)]
        won = [speedup(b, s, gamma, gamma) > 1 and b != 2 for b, s in cells]  # see make_profile
        right = sum((speedup(*at, scale * gamma, gamma) > 1) == faster for at, faster in zip(cells, won, strict=True))
        text = f"γ = {gamma}: {sum(won)} points beneficial, {14 - sum(won)} harmful"
        expected.append(f"{text}, {right / 14:.1%} predicted on the right side of 1")
    points, taus = points_of_sweep(profile.samples, float), {3: 3.0 * scale, 7: 7.0 * scale}
    drawing = toggle_boundary(profile.roofline, points, taus, 0.05, 48)
    assert drawing is not None and drawing.text == "; ".join(expected) + "."
    panels = [axes for axes in drawing.figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [f"γ = {gamma}, τ = {tau:.3g}" for gamma, tau in taus.items()]
    assert [len(axes.collections) for axes in panels] == [2 if scale == 1 else 1] * 2
    drawing.figure.savefig(io.BytesIO(), format="png")
