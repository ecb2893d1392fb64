"""Who drafted for which request, and when: a rollout in depth (SA Fig. 14)."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from ..generation.engine.timeline import RequestTimeline, slowest
from ..trainers.run_log import TIMELINES, RolloutRecord
from .figures import Drawing, canvas, drafter_colour


_PLAIN = "autoregressive"
_PLAIN_COLOUR = "#CCCCCC"
_HEIGHT = 0.8  # of a lane; the next one begins at 1


def timeline(timelines: Sequence[RequestTimeline], requests: int | None = None) -> Drawing | None:
    """One lane per request, that of the first to end on top: a colour per drafter, stripes of all racers where they
    race, grey where the request decodes autoregressively.

    Args:
        timelines: as `SpeculationStatistics.timeline` and `RolloutRecord.timeline` hold them. Of more than
            `TIMELINES` those that ended last are drawn.
        requests: how many there were, where `timelines` are not all of them.

    Returns:
        The numbers: "drawn" and "requests"; of the lanes drawn, "shares" of their seconds by drafters (racers joined
        by "+" in the order of their names); "raced", how many ever did; "first_race", the seconds after which the
        first of them began (None: nobody raced); "ended", those after which the last lane ended. None without lanes.
    """
    lanes = slowest(timelines, TIMELINES)
    if not lanes:
        return None
    requests = len(timelines) if requests is None else requests
    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    seconds: dict[str, float] = {}
    raced: dict[int, float] = {}  # by request, from when on
    for place, lane in enumerate(lanes):
        edges = [*lane.changes, (lane.ended, 0, [])]
        for (start, _, names), (end, _, _) in pairwise(edges):
            stripes = names or [_PLAIN]
            together = "+".join(sorted(stripes))
            seconds[together] = seconds.get(together, 0.0) + end - start
            for at, name in enumerate(stripes):
                low = place - _HEIGHT / 2 + at * _HEIGHT / len(stripes)
                high = low + _HEIGHT / len(stripes)
                boxes.setdefault(name, []).append([(start, low), (end, low), (end, high), (start, high)])
            if len(names) > 1:
                raced.setdefault(lane.request, start)
    figure, (axes,) = canvas(1)
    colours = {name: _PLAIN_COLOUR if name == _PLAIN else drafter_colour(name) for name in boxes}
    for name, colour in colours.items():
        axes.add_collection(PolyCollection(boxes[name], facecolor=colour, edgecolor="none"))
    whose = f"all {requests}" if len(lanes) == requests else f"the slowest {len(lanes)} of {requests}"
    ended = lanes[-1].ended
    axes.set(xlim=(0, ended), ylim=(len(lanes) - 0.5, -0.5), xlabel="seconds since the rollout's start")
    axes.set_ylabel(f"{whose} requests, by when they ended")
    axes.set_yticks([])
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    total = sum(seconds.values())
    shares = {together: spent / total for together, spent in seconds.items()}
    numbers = {
        "drawn": len(lanes),
        "requests": requests,
        "shares": shares,
        "raced": len(raced),
        "first_race": min(raced.values(), default=None),
        "ended": ended,
    }
    parts = sorted(shares.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{together} {share:.1%}" for together, share in parts)
    races = f"{len(raced)} of them raced, the first after {min(raced.values()):.3g} s" if raced else "nobody raced"
    text = f"{whose} requests, the last of which ended after {ended:.3g} s: {spent} of their time; {races}."
    return Drawing(figure, numbers, text)


def timeline_of_run(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """The last rollout in which anybody raced, or else the last one in which anybody drafted; its number is in the
    numbers as "rollout"."""
    for least in (2, 1):
        for record in reversed(rollouts):
            if any(len(names) >= least for lane in record.timeline for _, _, names in lane.changes):
                drawing = timeline(record.timeline, max(len(record.timeline), _requests(record)))
                assert drawing is not None  # there are changes
                drawing.numbers["rollout"] = record.rollout
                drawing.text = f"rollout {record.rollout}, {drawing.text}"
                return drawing
    return None


def _requests(record: RolloutRecord) -> int:
    """Of rank 0, whose timelines they are."""
    return record.completion_curve[-1][1] if record.completion_curve else 0
