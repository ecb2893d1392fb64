"""Draws panels, lines and boxes for the figures of all commands."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator


# Okabe and Ito's colours, for colour-blind readers.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
PALE = "#CCCCCC"
"""Autoregressive decoding."""
PLAIN = "autoregressive"
_DRAFTER_COLOURS = {
    "self": BLUE, "ngram": ORANGE, "history": GREEN, "model": VERMILLION, "eagle3": PURPLE, "dflash": SKY,
    "tts": "#000000", PLAIN: PALE,
}  # fmt: skip

Box = tuple[float, float, float, float]
"""Left, right, low, high."""


@dataclass
class Drawing:
    """A figure, a sentence with its numbers, and optionally a table (header first)."""

    figure: Figure
    text: str
    table: Sequence[Sequence[str]] = ()


def canvas(
    *labels: tuple[str, str], per_row: int = 2, width: float = 4.8, height: float = 3.8
) -> tuple[Figure, list[Axes]]:
    """Makes a figure with a panel, `width` by `height` inches, for each (x label, y label); without pyplot, which
    would keep it in memory."""
    columns = min(per_row, len(labels))
    lines = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(width * columns + 2, height * lines), layout="constrained")
    return figure, [
        figure.add_subplot(lines, columns, place, xlabel=x, ylabel=y) for place, (x, y) in enumerate(labels, start=1)
    ]


def draw_line(axes: Axes, xs: Sequence[float], ys: Sequence[float], **look: Any) -> None:
    """Draws a line over steps or rollouts, with a dot at each of fewer than 60."""
    axes.plot(xs, ys, **({"marker": "." if len(xs) < 60 else None} | look))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def stripes(box: Box, labels: Sequence[str]) -> list[tuple[str, Box]]:
    """`box` cut into a stripe of equal height for each label."""
    left, right, low, high = box
    edges = [low + (high - low) * part / len(labels) for part in range(len(labels) + 1)]
    return [(label, (left, right, *edge)) for label, edge in zip(labels, pairwise(edges), strict=True)]


def draw_boxes(axes: Axes, boxes: Iterable[tuple[Any, Box]], legend: Mapping[str, Any], **look: Any) -> None:
    """Draws filled (colour, box), and next to the axes a legend of colours by label, if any."""
    colours, places = zip(*boxes, strict=True)
    corners = [[(left, low), (right, low), (right, high), (left, high)] for left, right, low, high in places]
    axes.add_collection(PolyCollection(corners, facecolor=colours, edgecolor="none"))
    if legend:
        handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), **look)


def drafter_colour(name: str) -> str:
    """The colour of a drafter in every figure; drafters of users share one."""
    return _DRAFTER_COLOURS.get(name, YELLOW)


def percent(shares: Mapping[str, float]) -> str:
    """Shares as text, the largest first."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.1%}" for name, share in ordered) or "no phase took any time"


def changes(places: Sequence[Any], values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(place, value) where the value begins or changes."""
    pairs = list(zip(places, values, strict=True))
    return pairs[:1] + [after for before, after in pairwise(pairs) if before[1] != after[1]]
