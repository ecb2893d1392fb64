"""Fig. 14: lanes, stripes and colours, and which rollout of a run is drawn."""

import io
from typing import Any

import numpy
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from spec_trl.cli.figures import Drawing, drafter_colour
from spec_trl.cli.timeline_figure import timeline, timeline_of_run
from spec_trl.generation.engine.timeline import RequestTimeline
from spec_trl.trainers.run_log import TIMELINES
from tests.cli.sample_run import make_rollout
from tests.generation.calls import generate, outputs
from tests.generation.races import PROMPTS, Knowing, RandomPlans


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


def drawn(drawing: Drawing | None) -> Drawing:
    assert drawing is not None
    drawing.figure.savefig(io.BytesIO(), format="png")
    return drawing


def test_lanes_by_end_with_stripes_where_they_race() -> None:
    drawing = drawn(timeline(RACED))
    assert boxes(drawing) == {
        "#CCCCCC": {(0.5, 1.0, -0.4, 0.4), (0.5, 1.0, 1.6, 2.4)},
        drafter_colour("self"): {
            (1.0, 3.0, -0.4, 0.4), (1.5, 2.5, 0.6, 1.4), (2.5, 3.5, 1.0, 1.4), (1.0, 3.0, 1.6, 2.4),
            (3.0, 5.5, 1.6, 2.0),
        },
        drafter_colour("ngram"): {(2.5, 3.5, 0.6, 1.0), (3.5, 4.5, 0.6, 1.4), (3.0, 5.5, 2.0, 2.4)},
    }  # fmt: skip
    (axes,) = drawing.figure.axes
    assert axes.get_ylim() == (2.5, -0.5) and axes.get_xlim() == (0, 5.5)


def test_numbers_and_text() -> None:
    drawing = drawn(timeline(RACED))
    total = 2.5 + 5.0 + 3.0
    shares = {"autoregressive": 1.0 / total, "self": 5.0 / total, "ngram+self": 3.5 / total, "ngram": 1.0 / total}
    assert drawing.numbers.pop("shares") == pytest.approx(shares)
    assert drawing.numbers == {"drawn": 3, "requests": 3, "raced": 2, "first_race": 2.5, "ended": 5.5}
    assert drawing.text == (
        "all 3 requests, the last of which ended after 5.5 s: self 47.6%, ngram+self 33.3%, autoregressive 9.5%, "
        "ngram 9.5% of their time; 2 of them raced, the first after 2.5 s."
    )
    quiet = drawn(timeline(ALONE))
    assert quiet.numbers["raced"] == 0 and quiet.numbers["first_race"] is None
    assert quiet.text.endswith("of their time; nobody raced.")


def test_of_many_requests_the_slowest_are_drawn() -> None:
    many = [RequestTimeline(i, [(0.0, 0, ["self"])], 1.0 + (i * 37 % 100)) for i in range(100)]
    drawing = drawn(timeline(many))
    assert (drawing.numbers["drawn"], drawing.numbers["requests"]) == (TIMELINES, 100)
    assert drawing.text.startswith(f"the slowest {TIMELINES} of 100 requests, the last of which ended after 100 s")
    assert min(box[1] for box in boxes(drawing)[drafter_colour("self")]) == 100 - TIMELINES + 1
    assert timeline([]) is None


def test_the_last_rollout_that_raced_is_drawn() -> None:
    def run(*kinds: list[RequestTimeline]) -> list[Any]:
        return [make_rollout(i, timeline=kind, completion_curve=[(2.0, 9)]) for i, kind in enumerate(kinds)]

    raced = drawn(timeline_of_run(run(RACED, RACED, ALONE, PLAIN)))
    assert raced.numbers["rollout"] == 1 and raced.numbers["requests"] == 9
    assert raced.text.startswith("rollout 1, the slowest 3 of 9 requests")
    assert drawn(timeline_of_run(run(ALONE, ALONE, PLAIN))).numbers["rollout"] == 1
    assert timeline_of_run(run(PLAIN, [])) is None and timeline_of_run([]) is None


def test_statistics_of_a_generation_can_be_drawn(tiny: Any) -> None:
    answers = outputs(generate(tiny, PROMPTS))
    members = [Knowing(answers, 0, "self"), Knowing(answers, 1, "ngram")]
    statistics = generate(tiny, PROMPTS, drafter=members, control=RandomPlans(2)).statistics
    assert statistics is not None
    numbers = drawn(timeline(statistics.timeline)).numbers
    assert numbers["drawn"] == len(answers) and numbers["ended"] == statistics.completion_curve[-1][0]
    assert numbers["raced"] > 0 and set(numbers["shares"]) == {"autoregressive", "self", "ngram", "ngram+self"}
