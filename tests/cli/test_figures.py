"""Figures, judged by their numbers, each recomputed here from the records. The test of the report renders them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from spec_trl.cli import figures
from spec_trl.cli.figures import PALE, Drawing, drafter_colour, verdict_of_run
from spec_trl.cli.ladder_figure import draft_ladder
from spec_trl.cli.timeline_figure import timeline, timeline_of_run
from spec_trl.generation.engine.statistics import DraftCounts
from spec_trl.generation.engine.timeline import RequestTimeline
from spec_trl.scheduling.ladder import Ladder, Rung
from spec_trl.trainers.run_log import TIMELINES, RolloutRecord, Run
from spec_trl.trainers.verdict import verdict_of
from tests.cli.sample_run import make_header, make_rollout, make_step


ROLLOUTS = [make_rollout(i) for i in range(24)]
STEPS = [make_step(i) for i in range(1, 11)]


def drawn(drawing: Drawing | None) -> Drawing:
    assert drawing is not None and drawing.text
    return drawing


def test_steps_are_stacked_and_their_shares_are_means_without_the_first() -> None:
    numbers = drawn(figures.step_times(STEPS)).numbers
    assert numbers["steps"] == 9 and numbers["mean_seconds"] == pytest.approx(10.0)
    assert numbers["shares"] == pytest.approx(
        {"rollout": 0.6, "reward": 0.05, "logprobs": 0.1, "update": 0.2, "other": 0.05}
    )
    steps = [
        make_step(1),
        make_step(2, seconds=10.0, phases={"rollout": 9.0, "update": 1.0}),
        make_step(3, seconds=100.0, phases={"rollout": 10.0, "update": 90.0}),
    ]
    assert drawn(figures.step_times(steps)).numbers["shares"]["rollout"] == pytest.approx((0.9 + 0.1) / 2)
    # One step is its own mean, and what was not timed is "other".
    numbers = drawn(figures.step_times([make_step(1, seconds=8.0, phases={"rollout": 6.0})])).numbers
    assert numbers["shares"] == pytest.approx({"rollout": 0.75, "other": 0.25})
    # A step that is not there leaves a gap.
    (axes,) = drawn(figures.step_times([make_step(2), make_step(5)])).figure.axes
    below = [0.0] * 4
    for patch, height in zip(axes.patches, (6.0, 0.5, 1.0, 2.0, 0.5), strict=True):
        below = [low + height * (at in (0, 3)) for at, low in enumerate(below)]
        assert patch.get_data().values.tolist() == below
    assert [text.get_text() for text in axes.get_legend().get_texts()][0] == "other"  # on top


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
    expected = numpy.corrcoef([r.target_entropy for r in ROLLOUTS], [vars(r)[quantity] for r in ROLLOUTS])[0, 1]
    assert numbers["points"] == 24 and numbers["r"] == pytest.approx(expected) and -1 <= numbers["r"] < -0.9
    too_few = drawn(figures.entropy_against(ROLLOUTS[:2], quantity))
    assert too_few.numbers["r"] is None and "No Pearson r" in too_few.text
    for one, other in (([1.0, 2.0], [2.0, 1.0]), ([1.0, 2.0, 3.0], [2.0] * 3), ([1.0] * 3, [2.0, 3.0, 2.0])):
        assert figures.pearson(one, other) is None


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
    for figure in (
        figures.completion_curves, figures.speculation_spans, figures.draft_length_schedule, figures.depth_efficiency,
        figures.speedups, lambda records: figures.entropy_against(records, "block_efficiency"),
    ):  # fmt: skip
        assert figure([]) is figure([silent]) is None
    assert figures.rollout_phases([]) is figures.step_times([]) is figures.reward([make_step(1, reward=None)]) is None


# ---- verdict --------------------------------------------------------------------------------------------------------


def run_of(*rollouts: RolloutRecord) -> Run:
    return Run(Path("log"), [make_header(calibration_seconds=2.0)], list(rollouts), [])


def test_speedup_and_seconds_saved() -> None:
    run = run_of(
        make_rollout(0, seconds=4.0, plain_seconds=6.0), make_rollout(1, seconds=4.0, plain_seconds=None),
        make_rollout(2, seconds=5.0, plain_seconds=5.0, sd_on_fraction=0.0),
    )  # fmt: skip
    drawing = drawn(verdict_of_run(run))
    assert drawing.numbers["speedups"] == pytest.approx([1.5, math.nan, 1.0], nan_ok=True)
    assert drawing.numbers["saved"] == [0.0, 0.0, 0.0]
    assert drawing.text == str(verdict_of(run)[0])
    left, right = drawing.figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["drafted", "decoded plainly"]
    (line,) = [line for line in right.lines if len(line.get_xdata()) == 4]
    assert list(line.get_ydata()) == [-2.0, 0.0, 0.0, 0.0]  # what calibration took, before the first rollout
    assert verdict_of_run(run_of(make_rollout(0, plain_seconds=None))) is verdict_of_run(run_of()) is None


# ---- who drafted for whom (SA Fig. 14) ------------------------------------------------------------------------------


RACED = [
    RequestTimeline(0, [(0.5, 0, []), (1.0, 4, ["self"])], 3.0),
    RequestTimeline(1, [(0.5, 0, []), (1.0, 4, ["self"]), (3.0, 9, ["self", "ngram"])], 5.5),
    RequestTimeline(2, [(1.5, 5, ["self"]), (2.5, 8, ["ngram", "self"]), (3.5, 10, ["ngram"])], 4.5),
]
"""Requests 0 to 2 end first, last and in between."""
PLAIN = [RequestTimeline(0, [(0.0, 0, [])], 2.0)]
ALONE = [RequestTimeline(0, [(0.0, 0, []), (1.0, 1, ["tts"])], 2.0)]


def boxes(drawing: Drawing) -> dict[str, set[tuple[float, ...]]]:
    """By colour, (left, right, top, bottom) of each."""
    (axes,) = drawing.figure.axes
    found: dict[str, set[tuple[float, ...]]] = {}
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        corners = [path.vertices for path in collection.get_paths()]
        rectangles = {(*c[:, 0].min(0, keepdims=True), c[:, 0].max(), c[:, 1].min(), c[:, 1].max()) for c in corners}
        (colour,) = numpy.asarray(collection.get_facecolor())
        found[to_hex(colour).upper()] = {tuple(round(float(x), 6) for x in rectangle) for rectangle in rectangles}
    return found


def test_lanes_by_end_with_stripes_where_they_race() -> None:
    drawing = drawn(timeline(RACED))
    assert boxes(drawing) == {
        PALE: {(0.5, 1.0, -0.4, 0.4), (0.5, 1.0, 1.6, 2.4)},
        drafter_colour("self"): {
            (1.0, 3.0, -0.4, 0.4), (1.5, 2.5, 0.6, 1.4), (2.5, 3.5, 1.0, 1.4), (1.0, 3.0, 1.6, 2.4),
            (3.0, 5.5, 1.6, 2.0),
        },
        drafter_colour("ngram"): {(2.5, 3.5, 0.6, 1.0), (3.5, 4.5, 0.6, 1.4), (3.0, 5.5, 2.0, 2.4)},
    }  # fmt: skip
    (axes,) = drawing.figure.axes
    assert axes.get_ylim() == (2.5, -0.5) and axes.get_xlim() == (0, 5.5)
    total = 2.5 + 5.0 + 3.0
    shares = {"autoregressive": 1.0 / total, "self": 5.0 / total, "ngram+self": 3.5 / total, "ngram": 1.0 / total}
    assert drawing.numbers.pop("shares") == pytest.approx(shares)
    assert drawing.numbers == {"drawn": 3, "requests": 3, "raced": 2, "first_race": 2.5, "ended": 5.5}
    assert drawing.text == (
        "all 3 requests, the last of which ended after 5.5 s: self 47.6%, ngram+self 33.3%, autoregressive 9.5%, "
        "ngram 9.5% of their time; 2 of them raced, the first after 2.5 s."
    )
    alone = drawn(timeline(ALONE))
    assert alone.numbers["raced"] == 0 and alone.numbers["first_race"] is None
    assert alone.text.endswith("of their time; nobody raced.")
    assert timeline([]) is None


def test_of_many_requests_the_slowest_are_drawn() -> None:
    many = [RequestTimeline(i, [(0.0, 0, ["self"])], 1.0 + (i * 37 % 100)) for i in range(100)]
    drawing = drawn(timeline(many))
    assert (drawing.numbers["drawn"], drawing.numbers["requests"]) == (TIMELINES, 100)
    assert drawing.text.startswith(f"the slowest {TIMELINES} of 100 requests, the last of which ended after 100 s")
    assert min(box[1] for box in boxes(drawing)[drafter_colour("self")]) == 100 - TIMELINES + 1


def test_the_last_rollout_that_raced_is_drawn() -> None:
    def run(*kinds: list[RequestTimeline]) -> list[Any]:
        return [make_rollout(i, timeline=kind, completion_curve=[(2.0, 9)]) for i, kind in enumerate(kinds)]

    raced = drawn(timeline_of_run(run(RACED, RACED, ALONE, PLAIN)))
    assert raced.numbers["rollout"] == 1 and raced.numbers["requests"] == 9
    assert raced.text.startswith("rollout 1, the slowest 3 of 9 requests")
    assert drawn(timeline_of_run(run(ALONE, ALONE, PLAIN))).numbers["rollout"] == 1
    assert timeline_of_run(run(PLAIN, [])) is None and timeline_of_run([]) is None


# ---- draft ladder (SA Fig. 10a) -------------------------------------------------------------------------------------


SECONDS = {("ngram", 1): (1.305, 2.105), ("self", 1): (1.605, 1.805), ("self", 4): (3.5, 10.0)}
"""Of rounds of γ = 1 and γ = 4, by method and batch, where an autoregressive round takes one second."""
LADDER = Ladder(
    tuple(
        Rung(method, batch, gamma, p, seconds, 1.0)
        for (method, batch), both in SECONDS.items()
        for gamma, seconds in zip((1, 4), both, strict=True)
        for p in (0.25, 0.75)
    ),
    "some shape",
)


def tokens(p: float, gamma: int) -> float:
    return sum(p**k for k in range(gamma + 1))


def test_crossings_are_where_the_lines_cross() -> None:
    numbers = draft_ladder(LADDER).numbers["batches"]
    assert list(numbers) == [1, 4]
    grid = [step / 100 for step in range(101)]
    speedups = {
        method: [max(tokens(p, 1) / one, tokens(p, 4) / four) for p in grid]
        for method, (one, four) in (("ngram", SECONDS["ngram", 1]), ("self", SECONDS["self", 1]))
    }
    wins = {method: next(p for p, s in zip(grid, own, strict=True) if s > 1) for method, own in speedups.items()}
    assert numbers[1]["wins_from"] == wins == {"ngram": 0.31, "self": 0.46}
    crossing = next(p for p, n, s in zip(grid, *speedups.values(), strict=True) if p > 0.4 and s > n)
    assert numbers[1]["fastest"] == [(0.0, "none"), (0.31, "ngram"), (crossing, "self")]
    longer = next(p for p in grid if tokens(p, 4) / 2.105 > tokens(p, 1) / 1.305)
    assert numbers[1]["draft_lengths"]["ngram"] == [(0.0, 1), (longer, 4)]
    # Nobody wins among four rows: not even 2 tokens of 3.5 seconds, or 5 of 10; and lookups were not profiled there.
    assert numbers[4] == {
        "wins_from": {"self": None}, "fastest": [(0.0, "none")], "draft_lengths": {"self": [(0.0, 1)]},
    }  # fmt: skip


def test_a_method_wins_from_where_it_no_longer_loses() -> None:
    """Faster at p = 0 than at 0.5, where its rounds take twice as long."""
    rungs = [Rung("ngram", 1, 1, p, seconds, 1.0) for p, seconds in ((0.0, 0.5), (0.5, 2.0), (1.0, 1.0))]
    numbers = draft_ladder(Ladder(tuple(rungs), "")).numbers["batches"][1]
    assert numbers["fastest"][0] == (0.0, "ngram") and len(numbers["fastest"]) == 3
    assert numbers["wins_from"]["ngram"] == numbers["fastest"][2][0] > 0.5


def test_lines_points_and_text() -> None:
    drawing = draft_ladder(LADDER)
    first, second = drawing.figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["1 row", "4 rows"]
    plain, line, points, *_ = first.get_lines()
    assert list(plain.get_ydata()) == [1, 1]
    assert line.get_color() == points.get_color() == drafter_colour("ngram") != drafter_colour("self")
    assert len(line.get_xdata()) == 101 and line.get_ydata()[-1] == pytest.approx(5 / 2.105)
    found = sorted(zip(points.get_xdata(), points.get_ydata(), strict=True))
    expected = sorted((p, tokens(p, g) / s) for g, s in ((1, 1.305), (4, 2.105)) for p in (0.25, 0.75))
    assert [x for x, _ in found] == [x for x, _ in expected]
    assert [y for _, y in found] == pytest.approx([y for _, y in expected])
    assert drawing.text.startswith(
        "batch 1: faster than plain decoding: ngram from p = 0.31, self from p = 0.46; "
        "fastest at equal p: none, from 0.31 on ngram, from "
    )
    assert drawing.text.endswith("batch 4: faster than plain decoding: self at no p; fastest at equal p: none.")
    drawing.figure.draw_without_rendering()
