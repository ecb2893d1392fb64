"""Figures of the TTS benchmark, shaped like the paper's (arXiv 2605.09329)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spec_trl.cli.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION

from .tts_drafters import FROZEN, NONE, TITLES, TTS


Row = dict[str, Any]
_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE)
_DPI = 75


def by_panel(
    rows: Sequence[Row], draw: Callable[[Axes, list[Row]], None], path: Path, xlabel: str, ylabel: str
) -> str:
    """One panel for each drafter and temperature; returns the file's name."""
    panels: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["kind"], row["temperature"]), []).append(row)
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns + 0.6, 2.7 * lines + 0.3), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, ((kind, temperature), own) in zip(grid.flat, panels.items(), strict=False):
        draw(axes, own)
        axes.set(title=f"{TITLES[kind]}, T = {temperature:g}", xlabel=xlabel, ylabel=ylabel)
    if grid[0][0].get_legend_handles_labels()[0]:
        grid[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=_DPI)
    return path.name


def depth_figure(rows: Sequence[Row], new_tokens: int, path: Path) -> str:
    """Acceptance length by output depth (TTS Fig. 1, 2, 5)."""

    def draw(axes: Axes, own: list[Row]) -> None:
        for row, colour in zip(own, (GREY, *_COLOURS), strict=False):
            axes.plot(centres(row["by_depth"], new_tokens), row["by_depth"], "o-", color=colour, label=row["way"])

    shown = [row for row in rows if row["way"] != NONE]
    return by_panel(shown, draw, path, "generated tokens", "acceptance length")


def centres(values: Sequence[object], new_tokens: int) -> list[float]:
    """Where the middles of equal bins lie."""
    return [(i + 0.5) * new_tokens / len(values) for i in range(len(values))]


def strides_figure(rows: Sequence[Row], strides: Sequence[int], path: Path) -> str:
    """Acceptance length and throughput over the frozen drafter's, by stride (TTS Tab. 3, 7, 8)."""

    def draw(axes: Axes, own: list[Row]) -> None:
        found = {row["way"]: row for row in own}
        lines = (
            ("", "tau", "acceptance length", BLUE),
            ("", "speed_ratio", "throughput", VERMILLION),
            (" async", "speed_ratio", "throughput, asynchronous", ORANGE),
        )
        for suffix, quantity, label, colour in lines:
            base = found[FROZEN][quantity]
            values = [found[f"S={stride}{suffix}"][quantity] / base for stride in strides]
            axes.plot(strides, values, "o-", color=colour, label=label)
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(strides, [str(stride) for stride in strides])
        axes.minorticks_off()

    return by_panel(rows, draw, path, "stride S", "over frozen")


def bars_figure(rows: Sequence[Row], path: Path) -> str:
    """Acceptance length of each way (TTS Fig. 6a)."""

    def draw(axes: Axes, own: list[Row]) -> None:
        names = [row["way"] for row in own]
        colours = [GREY if name == FROZEN else BLUE for name in names]
        axes.bar(names, [row["tau"] for row in own], color=colours)
        axes.tick_params(axis="x", rotation=60, labelsize=7)
        axes.set_ylim(bottom=max(0.0, min(row["tau"] for row in own) - 0.5))  # differences are small

    return by_panel([row for row in rows if row["way"] != NONE], draw, path, "", "acceptance length")


def distributions_figure(rows: Sequence[Row], new_tokens: int, path: Path) -> str:
    """Target entropy, and the draft's cross-entropy on the target's likeliest token (TTS Fig. 4a–c, 6b)."""

    def draw(axes: Axes, own: list[Row]) -> None:
        found = {row["way"]: row["distributions"][:-1] for row in own}
        x = centres(found[FROZEN], new_tokens)
        lines: list[tuple[str, str, str, str, str]] = [
            (FROZEN, "entropy", "target entropy", GREEN, "-"),
            (FROZEN, "cross_entropy", "draft, frozen", GREY, "-"),
            (TTS, "cross_entropy", "draft, TTS", BLUE, "-"),
            (FROZEN, "cross_entropy_seen", "frozen, token seen", VERMILLION, ":"),
            (FROZEN, "cross_entropy_unseen", "frozen, token unseen", ORANGE, ":"),
        ]
        for way, quantity, label, colour, style in lines:
            values = [each[quantity] for each in found[way]]
            points = [(a, b) for a, b in zip(x, values, strict=True) if b is not None]
            axes.plot([a for a, _ in points], [b for _, b in points], style, marker=".", color=colour, label=label)

    return by_panel([row for row in rows if "distributions" in row], draw, path, "generated tokens", "nats")


def run_figure(rows: Sequence[Row], path: Path) -> str:
    """Acceptance length request by request while a drafter goes on learning."""

    def draw(axes: Axes, own: list[Row]) -> None:
        (row,) = own
        for values, label, colour in zip(row["by_request"], (FROZEN, TTS), (GREY, BLUE), strict=True):
            axes.plot(range(1, len(values) + 1), values, ".-", color=colour, label=label)

    return by_panel(rows, draw, path, "request", "acceptance length")
