"""Fig. 11: measured points of a sweep and of a run, and how they are counted against the prediction."""

import io

import pytest

from spec_trl.cli.boundary import block_efficiency_of_run, points_of_run, points_of_sweep, toggle_boundary
from spec_trl.trainers.run_log import RoundPoint
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


def test_run_points_compare_tokens_per_second() -> None:
    rounds = [
        RoundPoint(4, 500.0, 0, 10, 0.2, 40),
        RoundPoint(4, 520.0, 5, 10, 0.5, 160),
        RoundPoint(2, 900.0, 5, 8, 0.4, 64),
        RoundPoint(1, 900.0, 5, 2, 0.4, 8),  # too few rounds
        RoundPoint(64, 60.0, 0, 50, 0.9, 3200),
    ]
    points, idle = points_of_run(
        [make_rollout(0, points=rounds[:2]), make_rollout(1, points=rounds[2:])], make_roofline()
    )
    lone, both = points
    assert (both.batch, both.length, both.draft_length, both.assumed_baseline) == (4, 520.0, 5, False)
    assert both.speedup == pytest.approx((160 / 5.0) / (40 / 2.0))
    assert lone.assumed_baseline
    assert lone.speedup == pytest.approx((64 / 3.2) / (2 / make_roofline().target_seconds(2, 900.0)))
    assert idle == [(64, 60.0)]


def test_run_points_pool_rollouts_by_rounds() -> None:
    plain, drafted = RoundPoint(4, 500.0, 0, 30, 0.1, 120), RoundPoint(4, 500.0, 5, 30, 0.3, 360)
    later = RoundPoint(4, 510.0, 5, 10, 0.7, 240)
    records = [make_rollout(0, points=[plain, drafted]), make_rollout(1, points=[later])]
    (point,), _ = points_of_run(records, make_roofline())
    assert point.length == pytest.approx((30 * 500 + 10 * 510) / 40)
    assert point.speedup == pytest.approx(600 / (30 * 0.3 + 10 * 0.7) / (120 / 3.0))
    assert block_efficiency_of_run(records) == {5: pytest.approx(600 / (40 * 4))}
    # One point is enough for a drawing, and none is not.
    alone = [make_rollout(0, points=[later])]
    points, idle = points_of_run(alone, make_roofline())
    drawing = toggle_boundary(make_roofline(), points, block_efficiency_of_run(alone), idle=idle)
    assert drawing is not None and "1 of the points" in drawing.text
    drawing.figure.savefig(io.BytesIO(), format="png")
    assert toggle_boundary(make_roofline(), [], {5: 4.0}) is None


def test_counts_and_agreement_by_draft_length() -> None:
    profile = make_profile()
    drawing = toggle_boundary(profile.roofline, points_of_sweep(profile.samples, float), {3: 3.0, 7: 7.0}, 0.05, 48)
    assert drawing is not None
    for gamma, numbers in drawing.numbers["draft_lengths"].items():
        predicted = [
            profile.roofline.speedup(b, s, gamma, gamma) > 1 for b in (1, 2, 4, 8, 16, 32, 64) for s in (128, 512)
        ]
        wrong = sum(predicted[2:4])  # at 2 rows verification took nine times as long as predicted
        assert wrong == 2
        assert numbers["beneficial"] == sum(predicted) - wrong
        assert numbers["harmful"] == 14 - numbers["beneficial"]
        assert numbers["agreement"] == pytest.approx(12 / 14)
    panels = [axes for axes in drawing.figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["γ = 3, τ = 3", "γ = 7, τ = 7"]


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_a_surface_all_on_one_side_of_the_boundary(scale: float) -> None:
    """There is nothing to draw a contour of; the colours still need 1 inside their range."""
    profile = make_profile()
    drawing = toggle_boundary(profile.roofline, points_of_sweep(profile.samples, float), {3: 3.0 * scale})
    assert drawing is not None
    drawing.figure.savefig(io.BytesIO(), format="png")
