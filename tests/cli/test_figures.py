"""Figures, judged by the sentences that go with them and by what is drawn. The test of the report renders them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb

from spec_trl.cli import figures
from spec_trl.cli.figures import plans_over_rounds, timeline, timeline_of_run, verdict_of_run
from spec_trl.cli.plotting import PALE, Drawing, drafter_colour
from spec_trl.generation.engine.statistics import DraftCounts, PlanChange, RequestTimeline, RoundPoint
from spec_trl.trainers.run_log import TIMELINES, RolloutRecord, Run
from spec_trl.trainers.run_verdict import verdict_of
from tests.cli.sample_run import make_header, make_rollout, make_step


ROLLOUTS = [make_rollout(i) for i in range(24)]
CURVE = [(1.0, 49), (2.0, 50), (3.0, 89), (4.0, 95), (5.0, 99), (9.0, 100)]
MARKS = "50 % after 2 s, 90 % after 4 s, 99 % after 5 s, 100 % after 9 s"


def drawn(drawing: Drawing | None) -> Drawing:
    assert drawing is not None
    return drawing


def steps(*seconds_and_phases: tuple[float, dict[str, float]]) -> Drawing | None:
    made = [make_step(at, seconds=s, phases=phases) for at, (s, phases) in enumerate(seconds_and_phases, start=1)]
    return figures.step_times(made)


def curves(records: Sequence[RolloutRecord]) -> Drawing | None:
    records = [make_rollout(0, completion_curve=[]), *(replace(r, completion_curve=CURVE) for r in records)]
    return figures.completion_curves(records)


def speedups(*pairs: tuple[float | None, float]) -> Drawing | None:
    return figures.speedups(
        [make_rollout(i, predicted_speedup=p, measured_speedup=m) for i, (p, m) in enumerate(pairs)]
    )


VARIED = [RoundPoint(8, 9.0, 5, "self", 89, 8.9, 1000), RoundPoint(8, 9.0, 2, "ngram", 11, 1.1, 200)]
PHASED = make_rollout(0, seconds=10.0, refresh_seconds=1.0, phase_seconds={"draft": 3.0, "verify": 4.0}, tokens=500)


@pytest.mark.parametrize(
    ("drawing", "text"),
    [
        (
            figures.step_times([make_step(i) for i in range(1, 11)]),
            "10 s per step over 9 steps: rollout 60.0%, update 20.0%, logprobs 10.0%, reward 5.0%, other 5.0%.",
        ),
        # Of each step the shares, then their mean; the first step does not count.
        (
            steps((9.0, {"reward": 9.0}), (10.0, {"rollout": 9.0, "update": 1.0}), (90.0, {"update": 90.0})),
            "50 s per step over 2 steps: update 55.0%, rollout 45.0%.",
        ),
        # One step is its own mean, and what was not timed is "other".
        (steps((8.0, {"rollout": 6.0})), "8 s per step over 1 step: rollout 75.0%, other 25.0%."),
        (
            figures.rollout_phases([PHASED]),
            "10 s per rollout, of which 1 s made the drafter; 50 tokens/s: verify 40.0%, draft 30.0%, other 20.0%, "
            "refresh 10.0%.",
        ),
        (curves(ROLLOUTS[:5]), f"rollout 0: {MARKS}; rollout 2: {MARKS}; rollout 4: {MARKS}."),
        (curves(ROLLOUTS[3:4]), f"rollout 3: {MARKS}."),
        (
            figures.draft_length_schedule(ROLLOUTS),
            "γ: 5 (rollout 0) → 7 (rollout 8) → 9 (rollout 16); τ went from "
            f"{ROLLOUTS[0].block_efficiency:.2f} to {ROLLOUTS[-1].block_efficiency:.2f}.",
        ),
        (
            figures.draft_length_schedule(
                [make_rollout(i, points=VARIED, mean_draft_length=2.0 + i, block_efficiency=3.0 + i) for i in (0, 2)]
            ),
            "γ: 3.0 on average, 2.0 to 4.0 by rollout; τ went from 3.00 to 5.00.",
        ),
        # 1.2 against exactly 1 is not on one side, nor 0.9 against 1.2.
        (
            speedups((1.2, 1.0), (0.9, 1.2), (1.5, 1.5), (None, 2.0)),
            "predicted 1.20×, measured 1.23× on average over 3 rollouts; mean error of the prediction 15.0%; it was "
            "on the right side of 1 in 33% of them.",
        ),
        (
            figures.rank_seconds(
                [
                    make_rollout(0, seconds=10.0, rank_seconds=[10.0, 5.0], moved_rows=2),
                    make_rollout(1, seconds=4.0, rank_seconds=[4.0, 4.0], moved_rows=1),
                    make_rollout(2),
                ]
            ),
            "2 ranks had nothing to decode in 12.5% of their time; 3 rows moved between ranks.",
        ),
    ],
)
def test_the_sentence(drawing: Drawing | None, text: str) -> None:
    assert drawn(drawing).text == text


def test_phases_are_stacked() -> None:
    """What is "other" is on top, and a step that is not there leaves a gap."""
    (axes,) = drawn(figures.step_times([make_step(2), make_step(5)])).figure.axes
    below = [0.0] * 4
    for patch, height in zip(axes.patches, (6.0, 0.5, 1.0, 2.0, 0.5), strict=True):
        below = [low + height * (at in (0, 3)) for at, low in enumerate(below)]
        assert patch.get_data().values.tolist() == below
    assert [text.get_text() for text in axes.get_legend().get_texts()][0] == "other"


@pytest.mark.parametrize("quantity", ["first_token_acceptance", "block_efficiency"])
def test_entropy_correlation(quantity: str) -> None:
    records = [replace(ROLLOUTS[5], **{quantity: None}), *ROLLOUTS]
    r = numpy.corrcoef([r.target_entropy for r in ROLLOUTS], [vars(r)[quantity] for r in ROLLOUTS])[0, 1]
    assert drawn(figures.entropy_against(records, quantity)).text == f"Pearson r = {r:.2f} over 24 rollouts."
    alike = [replace(record, **{quantity: 0.5}) for record in ROLLOUTS[:3]]
    same = [replace(record, target_entropy=0.5) for record in ROLLOUTS[:3]]
    for few in (ROLLOUTS[:2], alike, same):
        assert drawn(figures.entropy_against(few, quantity)).text.startswith("No Pearson r: ")


def test_depth_pools_counts_and_compares_both_ends() -> None:
    def counts(tau: float) -> dict[int, DraftCounts]:
        return {0: DraftCounts(50, 30, 10, committed=40), 512: DraftCounts(50, 20, 10, committed=round(10 * tau))}

    records = [make_rollout(i, per_depth=counts(2.0 if i < 5 else 3.0 if i >= 7 else 2.5)) for i in range(12)]
    drawing = drawn(figures.depth_efficiency(records))
    assert drawing.text == "τ 4.00 at 0-512, τ 2.50 at 512- tokens."
    assert [row[0] for row in drawing.table] == ["depth (tokens)", "0-512", "512-"]
    assert drawing.table[2][1:] == ["120", "2.500", "0.400", "2.000", "3.000"]


def test_without_data_there_is_no_figure() -> None:
    silent = make_rollout(
        0, block_efficiency=None, first_token_acceptance=None, predicted_speedup=None, measured_speedup=None,
        speculating=[], completion_curve=[], per_depth={}, plain_seconds=None,
    )  # fmt: skip
    for figure in (
        figures.completion_curves, plans_over_rounds, figures.draft_length_schedule, figures.depth_efficiency,
        figures.speedups, lambda records: figures.entropy_against(records, "block_efficiency"),
        lambda records: verdict_of_run(run_of(*records)),
    ):  # fmt: skip
        assert figure([]) is figure([silent]) is None
    assert figures.rollout_phases([]) is figures.step_times([]) is figures.reward([make_step(1, reward=None)]) is None


def run_of(*rollouts: RolloutRecord) -> Run:
    return Run(Path("log"), [make_header(calibration_seconds=2.0)], list(rollouts), [])


def test_speedup_and_seconds_saved() -> None:
    run = run_of(
        make_rollout(0, seconds=4.0, plain_seconds=6.0), make_rollout(1, seconds=4.0, plain_seconds=None),
        make_rollout(2, seconds=5.0, plain_seconds=5.0, sd_on_fraction=0.0),
    )  # fmt: skip
    drawing = drawn(verdict_of_run(run))
    assert drawing.text == str(verdict_of(run)[0])
    left, right = drawing.figure.axes
    (line,) = [line for line in left.lines if len(line.get_xdata()) == 3]
    assert list(line.get_ydata()) == pytest.approx([1.5, math.nan, 1.0], nan_ok=True)
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["drafted", "decoded plainly"]
    (line,) = [line for line in right.lines if len(line.get_xdata()) == 4]
    assert list(line.get_ydata()) == [-2.0, 0.0, 0.0, 0.0]  # what calibration took, before the first rollout


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
    """(left, right, low, high) of the boxes in the first panel, by colour."""
    (collection,) = drawing.figure.axes[0].collections
    assert isinstance(collection, PolyCollection)
    found: dict[str, set[tuple[float, ...]]] = {}
    for path, colour in zip(collection.get_paths(), numpy.asarray(collection.get_facecolor()), strict=True):
        sides = [*(reach(path.vertices[:, axis]) for axis in (0, 1) for reach in (numpy.min, numpy.max))]
        found.setdefault(to_hex(colour).upper(), set()).add(tuple(round(float(side), 6) for side in sides))
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
    assert drawing.text == (
        "all 3 requests, the last of which ended after 5.5 s: self 47.6%, ngram+self 33.3%, autoregressive 9.5%, "
        "ngram 9.5% of their time; 2 of them had several drafters at once, the first after 2.5 s."
    )
    assert drawn(timeline(ALONE)).text.endswith("of their time; 0 of them had several drafters at once.")
    assert timeline([]) is None
    drawn(timeline([RequestTimeline(0, [(0.5, 0, [])], 0.5)]))  # it ended with its first token


def test_of_many_requests_the_slowest_are_drawn() -> None:
    drawing = drawn(timeline([RequestTimeline(i, [(0.0, 0, ["self"])], 1.0 + (i * 37 % 100)) for i in range(100)]))
    assert drawing.text.startswith(f"the slowest {TIMELINES} of 100 requests, the last of which ended after 100 s")
    assert min(box[1] for box in boxes(drawing)[drafter_colour("self")]) == 100 - TIMELINES + 1


def test_the_last_rollout_that_raced_is_drawn() -> None:
    def run(*kinds: list[RequestTimeline]) -> list[Any]:
        return [make_rollout(i, timeline=kind, completion_curve=[(2.0, 9)]) for i, kind in enumerate(kinds)]

    raced = drawn(timeline_of_run(run(RACED, RACED, ALONE, PLAIN))).text
    assert raced.startswith("rollout 1, the slowest 3 of 9 requests")
    assert drawn(timeline_of_run(run(ALONE, ALONE, PLAIN))).text.startswith("rollout 1, ")
    assert timeline_of_run(run(PLAIN, [])) is timeline_of_run([]) is None


# ---- the plan over rounds -------------------------------------------------------------------------------------------


POINTS = [
    RoundPoint(8, 60.0, 0, None, 30, 15.0, 240), RoundPoint(8, 90.0, 5, "self", 10, 10.0, 320),
    RoundPoint(4, 90.0, 10, "self+ngram", 40, 32.0, 640), RoundPoint(2, 90.0, 0, None, 20, 8.0, 40),
]  # fmt: skip
CHANGES = [
    PlanChange(0, 0, 8),
    PlanChange(30, 5, 8, "self"),
    PlanChange(40, 10, 4, "self+ngram"),
    PlanChange(80, 0, 2),
]


def test_rows_over_rounds_with_the_colours_of_who_drafts() -> None:
    """Stripes for both of two, and the longest draft in the drafter's full colour; a shorter one is lighter."""
    old = make_rollout(9, speculating=[PlanChange(0, 5)])  # of a log without rows
    planned = [make_rollout(i, rounds=100, points=POINTS, speculating=CHANGES, reason=f"why {i}") for i in range(5)]
    drawing = drawn(plans_over_rounds([*planned, old]))
    assert [axes.get_title() for axes in drawing.figure.axes] == ["rollout 0", "rollout 2", "rollout 4"]
    lighter = to_hex([1 - 0.675 * (1 - part) for part in to_rgb(drafter_colour("self"))]).upper()
    assert boxes(drawing) == {
        PALE: {(0, 30, 0, 8), (80, 100, 0, 2)}, lighter: {(30, 40, 0, 8)},
        drafter_colour("self"): {(40, 80, 0, 2)}, drafter_colour("ngram"): {(40, 80, 2, 4)},
    }  # fmt: skip
    assert drawing.text == (
        "autoregressive 50.0%, self+ngram 40.0%, self 10.0% of all rounds; rollout 0: why 0; rollout 2: why 2; "
        "rollout 4: why 4."
    )
    assert drawing.table[1:] == [
        ["autoregressive", "0", "50.0%", "5.6", "1.00", "12"], ["self", "5", "10.0%", "8.0", "4.00", "32"],
        ["self+ngram", "10", "40.0%", "4.0", "4.00", "20"],
    ]  # fmt: skip
    assert plans_over_rounds([old]) is None
