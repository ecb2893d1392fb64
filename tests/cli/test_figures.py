"""The figures of a run, judged by the numbers in them, each recomputed here from the records."""

import io
import math
from dataclasses import replace

import pytest

from spec_trl.cli import figures
from spec_trl.generation.engine.statistics import DraftCounts
from tests.cli.sample_run import make_rollout, make_step


ROLLOUTS = [make_rollout(i) for i in range(24)]
STEPS = [make_step(i) for i in range(1, 11)]


def drawn(drawing: figures.Drawing | None) -> figures.Drawing:
    """The drawing, after it was rendered to PNG."""
    assert drawing is not None and drawing.text
    buffer = io.BytesIO()
    drawing.figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")
    return drawing


def test_step_shares_are_means_without_the_first_step() -> None:
    numbers = drawn(figures.step_times(STEPS)).numbers
    assert numbers["steps"] == 9 and numbers["mean_seconds"] == pytest.approx(10.0)
    assert numbers["shares"] == pytest.approx(
        {"rollout": 0.6, "reward": 0.05, "logprobs": 0.1, "update": 0.2, "other": 0.05}
    )


def test_shares_are_averaged_over_steps_not_over_seconds() -> None:
    steps = [
        make_step(1),
        make_step(2, seconds=10.0, phases={"rollout": 9.0, "update": 1.0}),
        make_step(3, seconds=100.0, phases={"rollout": 10.0, "update": 90.0}),
    ]
    assert drawn(figures.step_times(steps)).numbers["shares"]["rollout"] == pytest.approx((0.9 + 0.1) / 2)


def test_one_step_is_its_own_mean_and_untimed_seconds_are_other() -> None:
    numbers = drawn(figures.step_times([make_step(1, seconds=8.0, phases={"rollout": 6.0})])).numbers
    assert numbers["shares"] == pytest.approx({"rollout": 0.75, "other": 0.25})


def test_a_missing_step_leaves_a_gap() -> None:
    drawing = drawn(figures.step_times([make_step(2), make_step(5)]))
    heights = drawing.figure.axes[0].patches[0].get_data().values
    assert heights.tolist() == [6.0, 0.0, 0.0, 6.0]


def test_rollout_phases_with_refresh_and_rest() -> None:
    record = make_rollout(
        0, seconds=10.0, refresh_seconds=1.0, phase_seconds={"draft": 3.0, "verify": 4.0}, tokens=500
    )
    numbers = drawn(figures.rollout_phases([record])).numbers
    assert numbers["shares"] == pytest.approx({"draft": 0.3, "verify": 0.4, "refresh": 0.1, "other": 0.2})
    assert numbers["tokens_per_second"] == pytest.approx(50.0)


def test_completion_marks_of_first_middle_and_last_rollout() -> None:
    curve = [(1.0, 49), (2.0, 50), (3.0, 89), (4.0, 95), (5.0, 99), (9.0, 100)]
    records = [replace(record, completion_curve=curve) for record in ROLLOUTS[:5]]
    records.insert(0, make_rollout(0, completion_curve=[]))
    marks = drawn(figures.completion_curves(records)).numbers["marks"]
    assert marks == {rollout: {50: 2.0, 90: 4.0, 99: 5.0, 100: 9.0} for rollout in (0, 2, 4)}


def test_completion_curve_of_a_single_rollout() -> None:
    assert list(drawn(figures.completion_curves(ROLLOUTS[3:4])).numbers["marks"]) == [3]


def test_spans_count_rounds_by_draft_length() -> None:
    records = [
        make_rollout(0, rounds=100, speculating=[(0, 0), (30, 5), (60, 0), (70, 7)]),
        make_rollout(1, rounds=10, speculating=[(0, 0)]),
    ]
    numbers = drawn(figures.speculation_spans(records)).numbers
    assert numbers["rounds"] == {0: 50, 5: 30, 7: 30}
    assert numbers["on_fraction"] == pytest.approx(60 / 110)


def test_schedule_names_the_moves() -> None:
    numbers = drawn(figures.draft_length_schedule(ROLLOUTS)).numbers
    assert numbers["changes"] == [(0, 5), (8, 7), (16, 9)]
    assert (numbers["first"], numbers["last"]) == (ROLLOUTS[0].block_efficiency, ROLLOUTS[-1].block_efficiency)


@pytest.mark.parametrize("quantity", ["first_token_acceptance", "block_efficiency"])
def test_entropy_correlation(quantity: str) -> None:
    records = [replace(ROLLOUTS[5], **{quantity: None}), *ROLLOUTS]
    numbers = drawn(figures.entropy_against(records, quantity)).numbers
    xs, ys = [r.target_entropy for r in ROLLOUTS], [vars(r)[quantity] for r in ROLLOUTS]
    mx, my = sum(xs) / 24, sum(ys) / 24
    covariance = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    spread = math.sqrt(sum((x - mx) ** 2 for x in xs) * sum((y - my) ** 2 for y in ys))
    assert numbers["points"] == 24
    assert numbers["r"] == pytest.approx(covariance / spread) and -1 <= numbers["r"] < -0.9


def test_no_correlation_of_too_little() -> None:
    assert figures.pearson([1.0, 2.0], [2.0, 1.0]) is None
    assert figures.pearson([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) is None
    assert figures.pearson([1.0, 1.0, 1.0], [2.0, 3.0, 2.0]) is None
    assert figures.pearson([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    drawing = drawn(figures.entropy_against(ROLLOUTS[:2], "block_efficiency"))
    assert drawing.numbers["r"] is None and "No Pearson r" in drawing.text


def test_depth_pools_counts_and_compares_both_ends() -> None:
    def counts(tau: float) -> dict[int, DraftCounts]:
        return {0: DraftCounts(50, 30, 10, committed=40), 512: DraftCounts(50, 20, 10, committed=round(10 * tau))}

    records = [make_rollout(i, per_depth=counts(2.0 if i < 5 else 3.0 if i >= 7 else 2.5)) for i in range(12)]
    drawing = drawn(figures.depth_efficiency(records))
    deep = drawing.numbers["depths"][512]
    assert deep["block_efficiency"] == pytest.approx((5 * 2.0 + 2 * 2.5 + 5 * 3.0) / 12)
    assert (deep["first"], deep["last"], deep["acceptance_rate"]) == pytest.approx((2.0, 3.0, 0.4))
    assert [row[0] for row in drawing.table] == ["depth (tokens)", "0-512", "512-"]
    assert drawing.table[2][1:] == ("120", "2.500", "0.400", "2.000", "3.000")


def test_speedup_errors_and_signs() -> None:
    pairs = [(1.2, 1.0), (0.9, 1.2), (1.5, 1.5), (None, 2.0)]
    records = [make_rollout(i, predicted_speedup=p, measured_speedup=m) for i, (p, m) in enumerate(pairs)]
    numbers = drawn(figures.speedups(records)).numbers
    assert numbers["points"] == 3
    assert numbers["mape"] == pytest.approx((0.2 + 0.25 + 0.0) / 3)
    assert numbers["same_sign"] == pytest.approx(1 / 3)  # 1.2 against exactly 1 is none, 0.9 against 1.2 is none


def test_without_data_there_is_no_figure() -> None:
    silent = make_rollout(
        0, block_efficiency=None, first_token_acceptance=None, predicted_speedup=None, measured_speedup=None,
        speculating=[], completion_curve=[], per_depth={},
    )  # fmt: skip
    for records in ([], [silent]):
        assert figures.completion_curves(records) is None
        assert figures.speculation_spans(records) is None
        assert figures.draft_length_schedule(records) is None
        assert figures.entropy_against(records, "block_efficiency") is None
        assert figures.depth_efficiency(records) is None
        assert figures.speedups(records) is None
    assert figures.rollout_phases([]) is None
    assert figures.step_times([]) is None and figures.reward([make_step(1, reward=None)]) is None
