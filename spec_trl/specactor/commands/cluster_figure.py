"""Which worker drafted with what, and when, by method (SA Fig. 14)."""

import itertools
from collections.abc import Mapping

from ...cli.plotting import BLUE, GREEN, ORANGE, PALE, PURPLE, SKY, VERMILLION, Box, Drawing, canvas, draw_boxes
from ..simulator import Outcome


WORKERS = 5
"""Lanes of a panel, as in the paper: the worker that is free first, and those that decode longest."""


def workers_over_time(outcomes: Mapping[str, Outcome]) -> Drawing:
    """One panel per method, one lane per worker: a colour per drafter, nothing where the worker idles."""
    labels = [("seconds since the rollout's start", "workers")] * len(outcomes)
    figure, panels = canvas(*labels, per_row=3, width=4.2, height=2.2)
    longest = max(outcome.rollout_seconds for outcome in outcomes.values())
    drafters = sorted({name for outcome in outcomes.values() for spans in outcome.spans for _, _, name in spans})
    colours = dict(zip(drafters, itertools.cycle((BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)), strict=False))
    colours["none"] = PALE
    for axes, (name, outcome) in zip(panels, outcomes.items(), strict=True):
        by_end = sorted(outcome.spans, key=lambda spans: spans[0][1] if spans else 0.0)
        lanes = [by_end[0], *by_end[1:][-(WORKERS - 1) :]]
        boxes: list[tuple[str, Box]] = []
        for place, spans in enumerate(lanes):
            boxes += [(drafter, (start, end, place - 0.4, place + 0.4)) for start, end, drafter in spans]
        legend = {drafter: colours[drafter] for drafter, _ in boxes}
        draw_boxes(axes, [(colours[drafter], box) for drafter, box in boxes], legend)
        axes.set(title=name, xlim=(0, longest), ylim=(len(lanes) - 0.5, -0.5), yticks=[])
    ends = ", ".join(f"{name} {outcome.rollout_seconds:.0f} s" for name, outcome in outcomes.items())
    return Drawing(figure, f"the last request ends after: {ends}.")
