"""Figures of a training run, each with the numbers it shows (ER Fig. 2, 4, 6, 8, 9, 12; Tab. 7).

A function returns None where the run has no data for its figure. Colours are Okabe and Ito's, which colour-blind
readers can tell apart.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..trainers.run_log import DepthCounts, RolloutRecord, StepRecord


ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"

_DRAFTER_COLOURS = {
    "self": BLUE, "ngram": ORANGE, "history": GREEN, "model": VERMILLION, "eagle3": PURPLE, "dflash": SKY,
    "tts": "#000000",
}  # fmt: skip
_PHASE_COLOURS = {
    "rollout": BLUE, "reward": GREEN, "logprobs": ORANGE, "update": VERMILLION, "other": GREY,
    "prefill": YELLOW, "noise": PURPLE, "draft": ORANGE, "verify": BLUE, "accept": GREEN, "compact": SKY,
    "control": VERMILLION, "refresh": "#000000",
}  # fmt: skip
_MARKS = (50, 90, 99)  # per cent of requests, as in ER App. B
_NEIGHBOURHOOD = 5  # rollouts at either end of a run that Tab. 7 and 8 would compare


@dataclass
class Drawing:
    """A figure, the numbers in it, a sentence that says them, and a table (header first) where one says more."""

    figure: Figure
    numbers: dict[str, Any]
    text: str
    table: Sequence[Sequence[str]] = ()


def step_times(steps: Sequence[StepRecord]) -> Drawing | None:
    """Seconds of each phase, stacked, by optimizer step (ER Fig. 2a, 6b).

    The numbers: "shares" of the phases and "mean_seconds". A run's first step, which builds the drafter and warms up,
    is drawn but left out of both, as in ER App. F.
    """
    if not steps:
        return None
    figure, (axes,) = canvas(1)
    parts = _stack(axes, [step.step for step in steps], [_with_rest(step.phases, step.seconds) for step in steps])
    axes.set(xlabel="optimizer step", ylabel="seconds")
    counted = slice(1, None) if len(steps) > 1 else slice(None)
    shares = _shares({name: values[counted] for name, values in parts.items()})
    seconds, count = statistics.fmean(step.seconds for step in steps[counted]), len(steps[counted])
    return Drawing(
        figure,
        {"shares": shares, "mean_seconds": seconds, "steps": count},
        f"{seconds:.3g} s per step over {count} {'steps' if count > 1 else 'step'}: {_percent(shares)}.",
    )


def reward(steps: Sequence[StepRecord]) -> Drawing | None:
    """Mean reward by optimizer step (ER Fig. 4c, 13)."""
    points = [(step.step, step.reward) for step in steps if step.reward is not None]
    if not points:
        return None
    figure, (axes,) = canvas(1)
    axes.plot(*zip(*points, strict=True), color=BLUE, marker="." if len(points) < 60 else None)
    axes.set(xlabel="optimizer step", ylabel="mean reward")
    first, last = points[0][1], points[-1][1]
    return Drawing(
        figure, {"first": first, "last": last}, f"{first:.3g} in the first step, {last:.3g} in the last one."
    )


def rollout_phases(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Seconds of the engine's phases, stacked, by rollout, and tokens per second beside them (ER Fig. 12)."""
    if not rollouts:
        return None
    figure, (left, right) = canvas(2)
    counts = [record.rollout for record in rollouts]
    entries = [_with_rest(r.phase_seconds | {"refresh": r.refresh_seconds}, r.seconds) for r in rollouts]
    parts = _stack(left, counts, entries)
    left.set(xlabel="training rollout", ylabel="seconds")
    rates = [record.tokens / record.seconds if record.seconds else math.nan for record in rollouts]
    right.plot(counts, rates, color=BLUE, marker="." if len(rates) < 60 else None)
    right.set(xlabel="training rollout", ylabel="tokens per second")
    right.set_ylim(bottom=0)
    shares = _shares(parts)
    seconds = statistics.fmean(record.seconds for record in rollouts)
    refresh = statistics.fmean(record.refresh_seconds for record in rollouts)
    rate = sum(record.tokens for record in rollouts) / (seconds * len(rollouts) or math.nan)
    return Drawing(
        figure,
        {"shares": shares, "mean_seconds": seconds, "mean_refresh_seconds": refresh, "tokens_per_second": rate},
        f"{seconds:.3g} s per rollout, of which {refresh:.3g} s made the drafter; {rate:.0f} tokens/s: "
        f"{_percent(shares)}.",
    )


def completion_curves(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Requests finished over time in the first, middle and last rollout, with 50, 90 and 99 % marks (ER Fig. 6a, c).

    The numbers: by rollout, the seconds after which each mark, and 100 %, was reached.
    """
    drawn = [record for record in rollouts if record.completion_curve]
    if not drawn:
        return None
    figure, (axes,) = canvas(1)
    chosen = sorted({0, len(drawn) // 2, len(drawn) - 1})
    marks: dict[int, dict[int, float]] = {}
    for index, colour in zip(chosen, (BLUE, ORANGE, GREEN), strict=False):
        record = drawn[index]
        seconds, finished = zip(*record.completion_curve, strict=True)
        total = finished[-1]
        shares = [100 * count / total for count in finished]
        axes.step([0, *seconds], [0, *shares], where="post", color=colour, label=f"rollout {record.rollout} ({total})")
        reached = {m: next(s for s, share in zip(seconds, shares, strict=True) if share >= m) for m in (*_MARKS, 100)}
        axes.plot([reached[mark] for mark in _MARKS], _MARKS, "o", color=colour)
        marks[record.rollout] = reached
    for mark in _MARKS:
        axes.axhline(mark, color=GREY, linewidth=0.5, linestyle=":")
        axes.annotate(f"{mark} %", (1, mark), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    axes.set(xlabel="seconds since the rollout's start", ylabel="finished requests (%)", ylim=(0, 103))
    axes.legend(title="(requests)", loc="lower right")
    texts = [
        f"rollout {rollout}: " + ", ".join(f"{mark} % after {s:.3g} s" for mark, s in reached.items())
        for rollout, reached in marks.items()
    ]
    return Drawing(figure, {"marks": marks}, "; ".join(texts) + ".")


def speculation_spans(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """For every rollout, which rounds decoded autoregressively and which speculated with what γ (ER §3.2).

    The numbers: "rounds" by γ (0: autoregressive) and "on_fraction" of all rounds.
    """
    drawn = [record for record in rollouts if record.rounds and record.speculating]
    if not drawn:
        return None
    rectangles: dict[int, list[list[tuple[float, float]]]] = {}
    rounds: dict[int, int] = {}
    for record in drawn:
        low, high = record.rollout - 0.5, record.rollout + 0.5
        for (start, draft_length), (end, _) in pairwise([*record.speculating, (record.rounds, 0)]):
            rectangles.setdefault(draft_length, []).append([(start, low), (end, low), (end, high), (start, high)])
            rounds[draft_length] = rounds.get(draft_length, 0) + end - start
    figure, (axes,) = canvas(1)
    colours = _draft_length_colours(rounds)
    for draft_length, boxes in sorted(rectangles.items()):
        axes.add_collection(PolyCollection(boxes, facecolor=colours[draft_length], edgecolor="none"))
    axes.set_xlim(0, max(record.rounds for record in drawn))
    axes.set_ylim(drawn[-1].rollout + 0.5, drawn[0].rollout - 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="decoding round (rank 0)", ylabel="training rollout")
    labels = {gamma: f"γ = {gamma}" if gamma else "autoregressive" for gamma in sorted(rounds)}
    handles = [Patch(color=colours[gamma], label=label) for gamma, label in labels.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    on = sum(count for gamma, count in rounds.items() if gamma) / (sum(rounds.values()) or math.nan)
    counts = ", ".join(f"{labels[gamma]}: {rounds[gamma]}" for gamma in sorted(rounds))
    numbers = {"rounds": dict(sorted(rounds.items())), "on_fraction": on}
    return Drawing(figure, numbers, f"{on:.1%} of all rounds speculated (rounds: {counts}).")


def draft_length_schedule(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """γ and its ceiling γ + 1 with the measured τ, by rollout (ER Fig. 4b, 14).

    The numbers: "changes" of γ as (rollout, γ), the first included, and the "first" and "last" τ.
    """
    drawn = [(r.rollout, r.draft_length, r.block_efficiency) for r in rollouts if r.block_efficiency is not None]
    if not drawn:
        return None
    figure, (axes,) = canvas(1)
    counts, gammas, taus = zip(*drawn, strict=True)
    axes.step(counts, gammas, where="mid", color=ORANGE, label="draft length γ")
    axes.step(counts, [g + 1 for g in gammas], where="mid", color=GREY, linestyle="--", label="ceiling γ + 1")
    axes.plot(counts, taus, color=BLUE, marker="." if len(taus) < 60 else None, label="block efficiency τ")
    axes.set(xlabel="training rollout", ylabel="tokens per verified block")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    changes = [(counts[0], gammas[0])]
    changes += [(counts[i], gammas[i]) for i in range(1, len(gammas)) if gammas[i] != gammas[i - 1]]
    moves = " → ".join(f"{gamma} (rollout {rollout})" for rollout, gamma in changes)
    return Drawing(
        figure,
        {"changes": changes, "first": taus[0], "last": taus[-1]},
        f"γ: {moves}; τ went from {taus[0]:.2f} to {taus[-1]:.2f}.",
    )


def entropy_against(rollouts: Sequence[RolloutRecord], quantity: str) -> Drawing | None:
    """Target entropy with "first_token_acceptance" or "block_efficiency", over time and as a scatter (ER Fig. 8, 9).

    The numbers: Pearson's "r" (None below three points or without variance) and "points".
    """
    label, colour = {
        "first_token_acceptance": ("first-token acceptance", VERMILLION),
        "block_efficiency": ("block efficiency τ (tokens per block)", ORANGE),
    }[quantity]
    values = [(r.rollout, r.target_entropy, vars(r)[quantity]) for r in rollouts]
    kept = [(count, x, y) for count, x, y in values if x is not None and y is not None]
    if not kept:
        return None
    counts, entropies, measured = zip(*kept, strict=True)
    r = pearson(entropies, measured)
    figure, (left, right) = canvas(2)
    left.plot(counts, entropies, color=BLUE, marker="." if len(counts) < 60 else None)
    left.set_xlabel("training rollout")
    left.set_ylabel("target entropy (nats)", color=BLUE)
    other = left.twinx()
    other.plot(counts, measured, color=colour, linestyle="--", marker="." if len(counts) < 60 else None)
    other.set_ylabel(label, color=colour)
    right.scatter(entropies, measured, c=counts, cmap="cividis", s=16)
    right.set(xlabel="target entropy (nats)", ylabel=label)
    if r is None:
        text = f"No Pearson r: it needs three rollouts that differ in both, and there are {len(kept)} rollouts."
    else:
        text = f"Pearson r = {r:.2f} over {len(kept)} rollouts."
        right.set_title(f"Pearson r = {r:.2f}")
    return Drawing(figure, {"r": r, "points": len(kept)}, text)


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's correlation; None below three points or where either side does not vary."""
    if len(xs) < 3 or min(xs) == max(xs) or min(ys) == max(ys):
        return None
    return statistics.correlation(xs, ys)


def depth_efficiency(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """τ by output depth at the start of a block (ER Tab. 7, 8).

    The numbers: by lower edge of the bin, "blocks", "block_efficiency" and "acceptance_rate" over all rollouts, and τ
    of the "first" and "last" five that speculated (None: no blocks there).
    """
    drawn = [record for record in rollouts if record.per_depth]
    if not drawn:
        return None
    total, first, last = (_by_depth(part) for part in (drawn, drawn[:_NEIGHBOURHOOD], drawn[-_NEIGHBOURHOOD:]))
    edges = sorted(edge for edge, counts in total.items() if counts.blocks)
    if not edges:
        return None
    figure, (axes,) = canvas(1)
    # The trainer logs bins with blocks only; a bin ends at the next one of those, the last is open.
    names = [f"{low}-{high}" for low, high in pairwise(edges)] + [f"{edges[-1]}-"]
    taus = [total[edge].committed / total[edge].blocks for edge in edges]
    axes.bar(range(len(edges)), taus, color=BLUE)
    axes.set_xticks(range(len(edges)), names, rotation=30)
    axes.set(xlabel="output depth (tokens)", ylabel="block efficiency τ (tokens per block)")
    numbers = {
        edge: {
            "blocks": total[edge].blocks,
            "block_efficiency": _tau(total[edge]),
            "acceptance_rate": total[edge].accepted / total[edge].drafted if total[edge].drafted else None,
            "first": _tau(first.get(edge)),
            "last": _tau(last.get(edge)),
        }
        for edge in edges
    }
    table: list[Sequence[str]] = [
        ("depth (tokens)", "blocks", "τ", "accepted", "τ, first 5 rollouts", "τ, last 5 rollouts")
    ]
    table += [
        (name, str(d["blocks"]), *(_number(d[k]) for k in ("block_efficiency", "acceptance_rate", "first", "last")))
        for name, d in zip(names, numbers.values(), strict=True)
    ]
    text = ", ".join(f"τ {tau:.2f} at {name}" for name, tau in zip(names, taus, strict=True))
    return Drawing(figure, {"depths": numbers}, f"{text} tokens.", table)


def speedups(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Speedup that the roofline predicted and that was measured, by rollout and against each other (ER Eq. 1, E.4).

    The numbers: "mape" of the prediction, "same_sign": share of rollouts on the same side of 1, means, and "points".
    """
    kept = [
        (r.rollout, r.predicted_speedup, r.measured_speedup)
        for r in rollouts
        if r.predicted_speedup is not None and r.measured_speedup is not None
    ]
    if not kept:
        return None
    counts, predicted, measured = zip(*kept, strict=True)
    figure, (left, right) = canvas(2)
    left.plot(counts, predicted, color=ORANGE, linestyle="--", marker=".", label="predicted")
    left.plot(counts, measured, color=BLUE, marker=".", label="measured")
    left.axhline(1, color=GREY, linewidth=0.8)
    left.set(xlabel="training rollout", ylabel="speedup over autoregressive rounds (×)")
    left.legend()
    bounds = [min(*predicted, *measured, 1.0), max(*predicted, *measured, 1.0)]
    right.plot(bounds, bounds, color=GREY, linewidth=0.8)
    right.axhline(1, color=GREY, linewidth=0.5, linestyle=":")
    right.axvline(1, color=GREY, linewidth=0.5, linestyle=":")
    right.scatter(predicted, measured, color=BLUE, s=16)
    right.set(xlabel="predicted speedup (×)", ylabel="measured speedup (×)")
    numbers = {
        "points": len(kept),
        "mean_predicted": statistics.fmean(predicted),
        "mean_measured": statistics.fmean(measured),
        "mape": statistics.fmean(abs(p - m) / m for p, m in zip(predicted, measured, strict=True) if m),
        "same_sign": statistics.fmean((p > 1) == (m > 1) for p, m in zip(predicted, measured, strict=True)),
    }
    return Drawing(
        figure,
        numbers,
        f"predicted {numbers['mean_predicted']:.2f}×, measured {numbers['mean_measured']:.2f}× on average over "
        f"{len(kept)} rollouts; mean error of the prediction {numbers['mape']:.1%}; it was on the right side of 1 in "
        f"{numbers['same_sign']:.0%} of them.",
    )


def canvas(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure of its own (pyplot would keep them all) with `panels` axes side by side."""
    figure = Figure(figsize=(4.8 * panels + 2, 3.8), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def drafter_colour(name: str) -> str:
    """The same in every figure; drafters that somebody made share one."""
    return _DRAFTER_COLOURS.get(name, YELLOW)


def _with_rest(phases: dict[str, float], seconds: float) -> dict[str, float]:
    """`phases` and, as "other", what they leave of `seconds`: phases are rank 0's, seconds the slowest rank's."""
    rest = max(0.0, seconds - sum(phases.values()))
    return phases | {"other": phases.get("other", 0.0) + rest}


def _stack(axes: Axes, positions: Sequence[int], entries: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Draws one stacked bar per position; returns the seconds of each phase by position, empty phases left out."""
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    names.sort(key=lambda name: name == "other")
    parts = {name: [entry.get(name, 0.0) for entry in entries] for name in names}
    parts = {name: values for name, values in parts.items() if any(values)}
    # One artist per phase: a patch per step and phase would take minutes for a long run.
    first = positions[0]
    edges = [first - 0.5 + i for i in range(positions[-1] - first + 2)]
    below = [0.0] * (len(edges) - 1)
    for name, values in parts.items():
        above = list(below)
        for position, value in zip(positions, values, strict=True):
            above[position - first] += value
        axes.stairs(above, edges, baseline=below, fill=True, color=_PHASE_COLOURS.get(name, PURPLE), label=name)
        below = above
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    return parts


def _shares(parts: dict[str, list[float]]) -> dict[str, float]:
    """Mean over the bars of each phase's share (ER App. B: of each step, then averaged)."""
    totals = [sum(bar) for bar in zip(*parts.values(), strict=True)]
    return {
        name: statistics.fmean(v / t for v, t in zip(values, totals, strict=True) if t) if any(totals) else 0.0
        for name, values in parts.items()
    }


def _by_depth(rollouts: Iterable[RolloutRecord]) -> dict[int, DepthCounts]:
    totals: dict[int, DepthCounts] = {}
    for record in rollouts:
        for edge, new in record.per_depth.items():
            old = totals.get(edge, DepthCounts(0, 0, 0, 0))
            totals[edge] = DepthCounts(
                old.blocks + new.blocks, old.committed + new.committed,
                old.drafted + new.drafted, old.accepted + new.accepted,
            )  # fmt: skip
    return totals


def _tau(counts: DepthCounts | None) -> float | None:
    return counts.committed / counts.blocks if counts is not None and counts.blocks else None


def _draft_length_colours(draft_lengths: Iterable[int]) -> dict[int, Any]:
    """Grey for autoregressive decoding; the longer the draft, the darker."""
    lengths = sorted(length for length in draft_lengths if length)
    shades = matplotlib.colormaps["viridis_r"]
    positions = {length: 0.15 + 0.8 * i / max(1, len(lengths) - 1) for i, length in enumerate(lengths)}
    return {0: "#CCCCCC"} | {length: shades(position) for length, position in positions.items()}


def _percent(shares: dict[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.1%}" for name, share in ordered) or "no phase took any time"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
