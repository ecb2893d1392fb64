"""Who drafted for which request, and when: a rollout in depth (SA Fig. 14)."""

from collections.abc import Sequence
from itertools import pairwise

from ..generation.engine.statistics import RequestTimeline, slowest
from ..trainers.run_log import TIMELINES, RolloutRecord
from .figures import PALE, Box, Drawing, canvas, drafter_colour, draw_boxes, percent


_PLAIN = "autoregressive"
_HEIGHT = 0.8  # of a lane; the next one begins at 1


def timeline(timelines: Sequence[RequestTimeline], requests: int | None = None) -> Drawing | None:
    """One lane per request, that of the first to end on top: a colour per drafter, stripes of all racers where they
    race, grey where the request decodes autoregressively. None without timelines.

    Args:
        timelines: as `SpeculationStatistics.timeline` and `RolloutRecord.timeline` hold them. Of more than
            `TIMELINES` those that ended last are drawn.
        requests: number of requests, where `timelines` are not all of them.
    """
    lanes = slowest(timelines, TIMELINES)
    if not lanes:
        return None
    requests = len(timelines) if requests is None else requests
    boxes: dict[str, list[Box]] = {}
    seconds: dict[str, float] = {}
    raced: dict[int, float] = {}  # by request, from when on
    for place, lane in enumerate(lanes):
        for (start, _, names), (end, _, _) in pairwise([*lane.changes, (lane.ended, 0, [])]):
            stripes = names or [_PLAIN]
            together = "+".join(sorted(stripes))
            seconds[together] = seconds.get(together, 0.0) + end - start
            height = _HEIGHT / len(stripes)
            for at, name in enumerate(stripes):
                low = place - _HEIGHT / 2 + at * height
                boxes.setdefault(name, []).append((start, end, low, low + height))
            if len(names) > 1:
                raced.setdefault(lane.request, start)
    whose = f"all {requests}" if len(lanes) == requests else f"the slowest {len(lanes)} of {requests}"
    figure, (axes,) = canvas(("seconds since the rollout's start", f"{whose} requests, by when they ended"))
    draw_boxes(axes, boxes, {name: PALE if name == _PLAIN else drafter_colour(name) for name in boxes})
    ended = lanes[-1].ended
    axes.set(xlim=(0, ended), ylim=(len(lanes) - 0.5, -0.5), yticks=[])
    shares = {together: spent / sum(seconds.values()) for together, spent in seconds.items()}
    races = f"{len(raced)} of them raced, the first after {min(raced.values()):.3g} s" if raced else "nobody raced"
    text = f"{whose} requests, the last of which ended after {ended:.3g} s: {percent(shares)} of their time; {races}."
    return Drawing(figure, text)


def timeline_of_run(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """The last rollout in which anybody raced, or else the last one in which anybody drafted."""
    for least in (2, 1):
        for record in reversed(rollouts):
            if any(len(names) >= least for lane in record.timeline for _, _, names in lane.changes):
                finished = record.completion_curve[-1][1] if record.completion_curve else 0  # requests of rank 0
                drawing = timeline(record.timeline, max(len(record.timeline), finished))
                assert drawing is not None  # there are changes
                drawing.text = f"rollout {record.rollout}, {drawing.text}"
                return drawing
    return None
