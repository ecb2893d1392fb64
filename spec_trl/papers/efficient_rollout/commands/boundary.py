"""Draws where speculation pays: predicted speedup with measured points (ER Fig. 11, App. E.4)."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from ....cli.arguments import MARGIN
from ....cli.plotting import BLUE, GREEN, VERMILLION, Drawing, canvas
from ....generation.engine.statistics import RoundPoint, added
from ....trainers.run_log import RolloutRecord
from ..roofline import Roofline
from ..sweep import Sample
from ..sweep import points as sweep_points


LEAST_ROUNDS = 3
"""Fewest rounds of a cell of a run that is drawn."""
_GRID = 48  # background cells per axis
# Pale, so that markers stand out at both ends; brown and violet differ for every kind of sight.
_SURFACE = LinearSegmentedColormap.from_list("speedup", ["#C2A878", "#FFFFFF", "#9C8FC4"])
_FASTER: dict[str, Any] = dict(color=GREEN, marker="o", markeredgecolor="white", linestyle="", markersize=6.6)
_SLOWER: dict[str, Any] = dict(color=VERMILLION, marker="x", markeredgewidth=2, linestyle="", markersize=6.6)
_SMALL: dict[str, Any] = dict(markersize=4.2, markeredgewidth=0.9)
_IDLE: dict[str, Any] = dict(color="#555555", marker=".", markersize=4, linestyle="")
_LIMIT: dict[str, Any] = dict(color="black", linestyle="--", linewidth=1)


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured speedup; with `assumed_baseline` no autoregressive time was measured, and the roofline's is used."""

    batch: int
    length: float
    draft_length: int
    speedup: float
    assumed_baseline: bool = False


def points_of_sweep(samples: Iterable[Sample], block_efficiency: Callable[[int], float]) -> list[MeasuredPoint]:
    """ER Eq. 4 at every (B, S, γ) of a sweep; `block_efficiency` gives τ for γ."""
    return [
        MeasuredPoint(p.batch, p.length, p.draft_length, block_efficiency(p.draft_length) * p.target / p.cycle)
        for p in sweep_points(samples)
    ]


def points_of_run(
    rollouts: Iterable[RolloutRecord], roofline: Roofline
) -> tuple[list[MeasuredPoint], list[tuple[int, float]]]:
    """Tokens per second of speculative over autoregressive rounds, pooled by batch, γ and half octaves of S. If none
    of them was autoregressive, the time of `roofline` is used, and the point says so.

    Returns:
        The points, and (batch, length) of the cells that only decoded autoregressively.
    """
    cells: dict[tuple[int, int, int], _Cell] = defaultdict(_Cell)
    for point in _points_of_profile(rollouts):
        place = point.batch, round(2 * math.log2(max(point.length, 1.0))), point.draft_length
        n = point.rounds
        cells[place] = added(cells[place], _Cell(n, point.seconds, point.tokens, n * point.length))
    measured: list[MeasuredPoint] = []
    idle = {(batch, band): cell.length for (batch, band, gamma), cell in cells.items() if gamma == 0 and cell.rounds}
    for (batch, band, draft_length), cell in sorted(cells.items()):
        if draft_length == 0 or cell.rounds < LEAST_ROUNDS or not cell.seconds or not cell.tokens:
            continue
        idle.pop((batch, band), None)
        plain = cells.get((batch, band, 0), _Cell())
        known = plain.rounds >= LEAST_ROUNDS and plain.tokens > 0
        # Eq. 1 with what was measured for both sides: seconds per token.
        baseline = plain.seconds / plain.tokens if known else roofline.target_seconds(batch, cell.length) / batch
        speedup = baseline * cell.tokens / cell.seconds
        measured.append(MeasuredPoint(batch, cell.length, draft_length, speedup, assumed_baseline=not known))
    return measured, [(batch, length) for (batch, _), length in sorted(idle.items())]


def block_efficiency_of_run(rollouts: Iterable[RolloutRecord]) -> dict[int, float]:
    """Tokens per row and speculative round, by γ."""
    tokens: dict[int, int] = defaultdict(int)
    rows: dict[int, int] = defaultdict(int)
    for point in _points_of_profile(rollouts):
        if point.draft_length and point.rounds >= LEAST_ROUNDS:
            tokens[point.draft_length] += point.tokens
            rows[point.draft_length] += point.rounds * point.batch
    return {gamma: tokens[gamma] / rows[gamma] for gamma in sorted(rows) if rows[gamma] and tokens[gamma]}


def _points_of_profile(rollouts: Iterable[RolloutRecord]) -> list[RoundPoint]:
    return [point for record in rollouts for point in record.points if point.drafter in (None, "self")]


def toggle_boundary(
    roofline: Roofline,
    points: Sequence[MeasuredPoint],
    block_efficiency: Mapping[int, float],
    margin: float = MARGIN,
    draft_max_rows: int | None = None,
    idle: Sequence[tuple[int, float]] = (),
) -> Drawing | None:
    """One panel per γ of `block_efficiency` (τ by γ): the predicted speedup, the contour 1 + ε and the points, with
    `idle` (batch, length) that decoded autoregressively. None without points.

    The text says for each γ how many points lie above and below 1, and how many of them on the predicted side.
    """
    if not points or not block_efficiency:
        return None
    lengths = _axis([*(point.length for point in points), *(length for _, length in idle)])
    batches = _axis([*(float(point.batch) for point in points), *(float(batch) for batch, _ in idle)])
    surfaces = {
        gamma: [[roofline.speedup(max(1, round(b)), s, tau, gamma) for s in lengths] for b in batches]
        for gamma, tau in block_efficiency.items()
    }
    values = [value for surface in surfaces.values() for row in surface for value in row]
    norm = TwoSlopeNorm(vcenter=1.0, vmin=min(*values, 0.8), vmax=max(*values, 1.2))
    labels = [("S (cached tokens per row)", "B (active rows)")] * len(surfaces)
    figure, panels = canvas(*labels, per_row=4, width=3.6, height=4.0)
    texts = []
    for axes, (gamma, surface) in zip(panels, surfaces.items(), strict=True):
        tau, here = block_efficiency[gamma], [point for point in points if point.draft_length == gamma]
        mesh = axes.pcolormesh(lengths, batches, surface, cmap=_SURFACE, norm=norm, shading="gouraud")
        if min(map(min, surface)) < 1 + margin < max(map(max, surface)):
            axes.contour(lengths, batches, surface, levels=[1 + margin], colors=BLUE, linewidths=2)
        if draft_max_rows is not None and batches[0] < draft_max_rows < batches[-1]:
            axes.axhline(draft_max_rows, **_LIMIT)
        axes.plot([length for _, length in idle], [batch for batch, _ in idle], **_IDLE)
        for point in here:
            look = (_FASTER if point.speedup > 1 else _SLOWER) | (_SMALL if point.assumed_baseline else {})
            axes.plot(point.length, point.batch, **look)
        axes.set(title=f"γ = {gamma}, τ = {tau:.3g}", xscale="log", yscale="log")
        for axis, places in ((axes.xaxis, lengths), (axes.yaxis, batches)):
            axis.set_major_locator(FixedLocator(_ticks(places)))
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_locator(NullLocator())
        beneficial = sum(point.speedup > 1 for point in here)
        texts.append(f"γ = {gamma}: {beneficial} points beneficial, {len(here) - beneficial} harmful")
        if here:
            right = [(roofline.speedup(p.batch, p.length, tau, gamma) > 1) == (p.speedup > 1) for p in here]
            texts[-1] += f", {statistics.fmean(right):.1%} predicted on the right side of 1"
    figure.colorbar(mesh, ax=panels, label="predicted speedup (×)")
    looks = {"measured: speculation faster": _FASTER, "measured: speculation slower": _SLOWER}
    looks[f"predicted speedup {1 + margin:g}"] = dict(color=BLUE, linewidth=2)
    if assumed := sum(point.assumed_baseline for point in points):
        looks["small: against the profile's autoregressive time"] = _FASTER | _SMALL
        texts.append(f"{assumed} of the points take the autoregressive time from the profile")
    if idle:
        looks["decoded autoregressively"] = _IDLE
    if draft_max_rows is not None:
        looks[f"the drafter's kernel ends at {draft_max_rows} rows"] = _LIMIT
    handles = [Line2D([], [], label=label, **look) for label, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return Drawing(figure, "; ".join(texts) + ".")


@dataclass
class _Cell:
    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0
    length_sum: float = 0.0

    @property
    def length(self) -> float:
        return self.length_sum / self.rounds


def _axis(values: Sequence[float]) -> list[float]:
    low, high = max(1.0, min(values)), max(1.0, *values)
    margin = max(1.2, math.sqrt(4 * low / high))
    low, high = low / margin, high * margin
    return [low * (high / low) ** (i / (_GRID - 1)) for i in range(_GRID)]


def _ticks(axis: Sequence[float]) -> list[int]:
    powers = [2**k for k in range(16) if axis[0] <= 2**k <= axis[-1]]
    return powers[:: math.ceil(len(powers) / 7)]
