"""Draws the figures of a training run, with sentences that name their numbers.

A function returns None where the run has no data for its figure.
"""

import math
import statistics
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from ..generation.engine.statistics import DraftCounts, PlanChange, RequestTimeline, RoundPoint, added, slowest
from ..trainers.run_log import TIMELINES, RolloutRecord, Run, StepRecord
from ..trainers.run_verdict import verdict_of
from .plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PLAIN,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Box,
    Drawing,
    canvas,
    changes,
    drafter_colour,
    draw_boxes,
    draw_line,
    percent,
    stripes,
)


_PHASE_COLOURS = {
    "rollout": BLUE, "reward": GREEN, "logprobs": ORANGE, "update": VERMILLION, "other": GREY,
    "prefill": YELLOW, "noise": PURPLE, "draft": ORANGE, "verify": BLUE, "accept": GREEN, "compact": SKY,
    "control": VERMILLION, "refresh": "#000000",
}  # fmt: skip
_ROLLOUT = "training rollout"
_MARKS = (50, 90, 99)  # per cent of requests, as in ER App. B
_NEIGHBOURHOOD = 5  # rollouts at either end of a run, compared in Tab. 7 and 8
_SHOWN = 0.01  # least share of all rounds of a plan in the table
_HEIGHT = 0.8  # of a lane; the distance of lanes is 1


def _spread(rollouts: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    return [rollouts[at] for at in sorted({0, len(rollouts) // 2, len(rollouts) - 1})]


def _known(rollouts: Sequence[RolloutRecord], *names: str) -> list[tuple[Any, ...]]:
    """(rollout, value of each field in `names`) of the rollouts with all of them."""
    rows = [(record.rollout, *(vars(record)[name] for name in names)) for record in rollouts]
    return [row for row in rows if None not in row]


def _with_rest(phases: dict[str, float], seconds: float) -> dict[str, float]:
    """`phases` (of rank 0) and, as "other", the rest of `seconds` (of the slowest rank)."""
    return added(phases, {"other": max(0.0, seconds - sum(phases.values()))})


def _stack(axes: Axes, positions: Sequence[int], bars: Sequence[dict[str, float]]) -> None:
    names = sorted({name: None for bar in bars for name in bar if bar[name]}, key=lambda name: name == "other")
    first = positions[0]
    edges = [first - 0.5 + i for i in range(positions[-1] - first + 2)]
    below = [0.0] * (len(edges) - 1)
    for name in names:  # one artist per phase: a patch per step and phase would take minutes for a long run
        above = list(below)
        for position, bar in zip(positions, bars, strict=True):
            above[position - first] += bar.get(name, 0.0)
        axes.stairs(above, edges, baseline=below, fill=True, color=_PHASE_COLOURS.get(name, PURPLE), label=name)
        below = above
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def _shares(bars: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the bars of a phase's share, by phase (ER App. B: by step, then averaged)."""
    timed = [bar for bar in bars if any(bar.values())]
    names = dict.fromkeys(name for bar in timed for name in bar if bar[name])
    return {name: statistics.fmean(bar.get(name, 0.0) / sum(bar.values()) for bar in timed) for name in names}


def step_times(steps: Sequence[StepRecord]) -> Drawing | None:
    """Seconds by phase, stacked, by optimizer step (ER Fig. 2a, 6b).

    A run's first step (building the drafter, warm-up) is drawn but left out of the means, as in ER App. F.
    """
    if not steps:
        return None
    figure, (axes,) = canvas(("optimizer step", "seconds"))
    bars = [_with_rest(step.phases, step.seconds) for step in steps]
    _stack(axes, [step.step for step in steps], bars)
    first = min(1, len(steps) - 1)
    count, seconds = len(steps) - first, statistics.fmean(step.seconds for step in steps[first:])
    steps_ = "steps" if count > 1 else "step"
    return Drawing(figure, f"{seconds:.3g} s per step over {count} {steps_}: {percent(_shares(bars[first:]))}.")


def reward(steps: Sequence[StepRecord]) -> Drawing | None:
    """Mean reward by optimizer step (ER Fig. 4c, 13)."""
    points = [(step.step, step.reward) for step in steps if step.reward is not None]
    if not points:
        return None
    figure, (axes,) = canvas(("optimizer step", "mean reward"))
    steps_, rewards = zip(*points, strict=True)
    draw_line(axes, steps_, rewards, color=BLUE)
    return Drawing(figure, f"{rewards[0]:.3g} in the first step, {rewards[-1]:.3g} in the last one.")


def rollout_phases(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Seconds of the engine's phases, stacked, by rollout, and tokens per second next to them (ER Fig. 12)."""
    if not rollouts:
        return None
    figure, (left, right) = canvas((_ROLLOUT, "seconds"), (_ROLLOUT, "tokens per second"))
    counts = [record.rollout for record in rollouts]
    bars = [_with_rest(r.phase_seconds | {"refresh": r.refresh_seconds}, r.seconds) for r in rollouts]
    _stack(left, counts, bars)
    rates = [record.tokens / record.seconds if record.seconds else math.nan for record in rollouts]
    draw_line(right, counts, rates, color=BLUE)
    right.set_ylim(0, None)
    seconds = statistics.fmean(record.seconds for record in rollouts)
    refresh = statistics.fmean(record.refresh_seconds for record in rollouts)
    rate = sum(record.tokens for record in rollouts) / (seconds * len(rollouts) or math.nan)
    text = f"{seconds:.3g} s per rollout, of which {refresh:.3g} s made the drafter; {rate:.0f} tokens/s"
    return Drawing(figure, f"{text}: {percent(_shares(bars))}.")


def completion_curves(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Requests finished over time in the first, middle and last rollout, with marks at 50, 90 and 99 % (ER Fig. 6)."""
    drawn = [record for record in rollouts if record.completion_curve]
    if not drawn:
        return None
    figure, (axes,) = canvas(("seconds since the rollout's start", "finished requests (%)"))
    texts = []
    for record, colour in zip(_spread(drawn), (BLUE, ORANGE, GREEN), strict=False):
        seconds, finished = zip(*record.completion_curve, strict=True)
        total = finished[-1]
        shares = [100 * count / total for count in finished]
        axes.step([0, *seconds], [0, *shares], where="post", color=colour, label=f"rollout {record.rollout} ({total})")
        reached = {m: next(s for s, share in zip(seconds, shares, strict=True) if share >= m) for m in (*_MARKS, 100)}
        axes.plot([reached[mark] for mark in _MARKS], _MARKS, "o", color=colour)
        marks = ", ".join(f"{mark} % after {second:.3g} s" for mark, second in reached.items())
        texts.append(f"rollout {record.rollout}: {marks}")
    for mark in _MARKS:
        axes.axhline(mark, color=GREY, linewidth=0.5, linestyle=":")
        axes.annotate(f"{mark} %", (1, mark), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    axes.set_ylim(0, 103)
    axes.legend(title="(requests)", loc="lower right")
    return Drawing(figure, "; ".join(texts) + ".")


def plans_over_rounds(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Rows in flight over rounds in the first, middle and last rollout: a colour per drafter, darker for longer
    drafts, stripes where two drafted. The table sums up the rounds of every plan, in all rollouts."""
    drawn = [r for r in rollouts if r.points and r.speculating and r.speculating[0].rows is not None]
    if not drawn:
        return None
    points = [point for record in drawn for point in record.points]
    longest = max(1, *(point.draft_length for point in points))
    shown = _spread(drawn)
    figure, panels = canvas(*[("decoding round (rank 0)", "rows in flight")] * len(shown), per_row=3, width=3.6)
    legend: dict[str, Any] = {}
    for axes, record in zip(panels, shown, strict=True):
        boxes = []
        for change, (end, *_) in pairwise([*record.speculating, PlanChange(record.rounds, 0)]):
            box = change.round, end, 0, change.rows or 0
            for name, stripe in stripes(box, _drafters(change)):
                boxes.append((_shade(name, change.draft_length / longest), stripe))
                legend[name] = _shade(name, 1.0)
        title = f"the darker, the longer\nthe draft (up to γ = {longest})" if set(legend) != {PLAIN} else None
        draw_boxes(axes, boxes, legend if axes is panels[-1] else {}, title=title, fontsize="small")
        most = max(change.rows or 0 for change in record.speculating)
        axes.set(title=f"rollout {record.rollout}", xlim=(0, record.rounds), ylim=(0, 1.05 * most))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    rounds = sum(point.rounds for point in points)
    by_plan: dict[tuple[str, int], list[RoundPoint]] = {}
    shares: dict[str, float] = {}
    for point in points:
        drafters = "+".join(_drafters(point))
        shares[drafters] = shares.get(drafters, 0.0) + point.rounds / rounds
        by_plan.setdefault((drafters, point.draft_length), []).append(point)
    table = [["who drafts", "γ", "share of rounds", "mean rows", "tokens per row and round", "tokens/s"]]
    for (drafters, draft_length), like in sorted(by_plan.items(), key=lambda item: (item[0][1] > 0, item[0])):
        count, tokens = sum(point.rounds for point in like), sum(point.tokens for point in like)
        rows, seconds = sum(point.rounds * point.batch for point in like), sum(point.seconds for point in like)
        if count >= _SHOWN * rounds:
            speed = f"{tokens / seconds:.0f}" if seconds else "-"
            cells = [f"{count / rounds:.1%}", f"{rows / count:.1f}", f"{tokens / rows:.2f}", speed]
            table.append([drafters, str(draft_length), *cells])
    reasons = "".join(f"; rollout {record.rollout}: {record.reason}" for record in shown if record.reason)
    return Drawing(figure, f"{percent(shares)} of all rounds{reasons}.", table)


def _drafters(plan: PlanChange | RoundPoint) -> list[str]:
    return (plan.drafter or "?").split("+") if plan.draft_length else [PLAIN]


def _shade(name: str, share: float) -> tuple[float, ...]:
    if name == PLAIN:
        return to_rgb(PALE)
    return tuple(1 - (0.35 + 0.65 * share) * (1 - part) for part in to_rgb(drafter_colour(name)))


def timeline(timelines: Sequence[RequestTimeline], requests: int | None = None) -> Drawing | None:
    """Timelines (SA Fig. 14): the drafters of each request over time. A lane per request, the first to end on top: a
    colour per drafter, stripes for several at once, grey for autoregressive decoding. None without timelines.

    Args:
        timelines: of `SpeculationStatistics` or `RolloutRecord`. The last `TIMELINES` to end are drawn.
        requests: number of requests, if `timelines` lacks some.
    """
    lanes = slowest(timelines, TIMELINES)
    if not lanes:
        return None
    requests = len(timelines) if requests is None else requests
    boxes: list[tuple[str, Box]] = []
    seconds: dict[str, float] = {}
    several: dict[int, float] = {}  # by request: when several drafters first drafted for it at once
    for place, lane in enumerate(lanes):
        for (start, _, names), (end, _, _) in pairwise([*lane.changes, (lane.ended, 0, [])]):
            together = "+".join(sorted(names)) or PLAIN
            seconds[together] = seconds.get(together, 0.0) + end - start
            boxes += stripes((start, end, place - _HEIGHT / 2, place + _HEIGHT / 2), names or [PLAIN])
            if len(names) > 1:
                several.setdefault(lane.request, start)
    whose = f"all {requests}" if len(lanes) == requests else f"the slowest {len(lanes)} of {requests}"
    figure, (axes,) = canvas(("seconds since the rollout's start", f"{whose} requests, by when they ended"))
    legend = {name: drafter_colour(name) for name, _ in boxes}
    draw_boxes(axes, [(legend[name], box) for name, box in boxes], legend)
    ended, total = lanes[-1].ended, sum(seconds.values()) or 1.0  # 0: all requests ended with their first token
    axes.set(xlim=(0, ended or 1.0), ylim=(len(lanes) - 0.5, -0.5), yticks=[])
    shares = {together: spent / total for together, spent in seconds.items()}
    first = f", the first after {min(several.values()):.3g} s" if several else ""
    together = f"{len(several)} of them had several drafters at once{first}"
    spent = f"{percent(shares)} of their time"
    return Drawing(figure, f"{whose} requests, the last of which ended after {ended:.3g} s: {spent}; {together}.")


def timeline_of_run(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """The timeline of the last rollout with several drafters at once for a request, else of the last with a draft."""
    for least in (2, 1):
        for record in reversed(rollouts):
            if any(len(names) >= least for lane in record.timeline for _, _, names in lane.changes):
                finished = record.completion_curve[-1][1] if record.completion_curve else 0  # requests of rank 0
                drawing = timeline(record.timeline, max(len(record.timeline), finished))
                assert drawing is not None  # there are changes
                drawing.text = f"rollout {record.rollout}, {drawing.text}"
                return drawing
    return None


def draft_length_schedule(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """γ with its ceiling γ + 1 and the measured τ, by rollout (ER Fig. 4b, 14); the mean γ, without a ceiling, if γ
    changes from round to round."""
    chosen = any(map(_varies, rollouts))
    drawn = _known(rollouts, "mean_draft_length" if chosen else "draft_length", "block_efficiency")
    if not drawn:
        return None
    figure, (axes,) = canvas((_ROLLOUT, "tokens per verified block"))
    counts, gammas, taus = zip(*drawn, strict=True)
    axes.step(counts, gammas, where="mid", color=ORANGE, label="mean draft length γ" if chosen else "draft length γ")
    if not chosen:
        axes.step(counts, [g + 1 for g in gammas], where="mid", color=GREY, linestyle="--", label="ceiling γ + 1")
    draw_line(axes, counts, taus, color=BLUE, label="block efficiency τ")
    axes.set_ylim(0, None)
    axes.legend(loc="lower right")
    moves = " → ".join(f"{gamma} (rollout {rollout})" for rollout, gamma in changes(counts, gammas))
    if chosen:
        moves = f"{statistics.fmean(gammas):.1f} on average, {min(gammas):.1f} to {max(gammas):.1f} by rollout"
    return Drawing(figure, f"γ: {moves}; τ went from {taus[0]:.2f} to {taus[-1]:.2f}.")


def _varies(record: RolloutRecord) -> bool:
    """Whether a tenth or more of the drafted rounds used each of at least two γ. (The end of a text cuts drafts.)"""
    rounds: dict[int, int] = {}
    for point in record.points:
        if point.draft_length:
            rounds[point.draft_length] = rounds.get(point.draft_length, 0) + point.rounds
    return sum(count >= 0.1 * sum(rounds.values()) for count in rounds.values()) > 1


def entropy_against(rollouts: Sequence[RolloutRecord], quantity: str) -> Drawing | None:
    """Target entropy with "first_token_acceptance" or "block_efficiency", over time and as a scatter with Pearson's r
    (ER Fig. 8, 9)."""
    label, colour = {
        "first_token_acceptance": ("first-token acceptance", VERMILLION),
        "block_efficiency": ("block efficiency τ (tokens per block)", ORANGE),
    }[quantity]
    known = _known(rollouts, "target_entropy", quantity)
    if not known:
        return None
    counts, entropies, measured = zip(*known, strict=True)
    figure, (left, right) = canvas((_ROLLOUT, ""), ("target entropy (nats)", label))
    draw_line(left, counts, entropies, color=BLUE)
    left.set_ylabel("target entropy (nats)", color=BLUE)
    other = left.twinx()
    draw_line(other, counts, measured, color=colour, linestyle="--")
    other.set_ylabel(label, color=colour)
    right.scatter(entropies, measured, c=counts, cmap="cividis", s=16)
    if len(known) < 3 or any(min(values) == max(values) for values in (entropies, measured)):
        text = f"No Pearson r: it needs three rollouts that differ in both; rollouts that show it: {len(known)}."
        return Drawing(figure, text)
    r = f"Pearson r = {statistics.correlation(entropies, measured):.2f}"
    right.set_title(r)
    return Drawing(figure, f"{r} over {len(known)} rollouts.")


def depth_efficiency(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """τ by output depth at the start of a block (ER Tab. 7, 8), in the table also of the first and the last five
    rollouts that speculated."""
    drawn = [record.per_depth for record in rollouts if record.per_depth]
    total, first, last = (
        reduce(added, part, dict[int, DraftCounts]())
        for part in (drawn, drawn[:_NEIGHBOURHOOD], drawn[-_NEIGHBOURHOOD:])
    )
    edges = sorted(edge for edge, counts in total.items() if counts.blocks)
    if not edges:
        return None
    figure, (axes,) = canvas(("output depth (tokens)", "block efficiency τ (tokens per block)"))
    names = [f"{low}-{high}" for low, high in pairwise(edges)] + [f"{edges[-1]}-"]
    taus = [total[edge].block_efficiency for edge in edges]
    axes.bar(range(len(edges)), taus, color=BLUE)
    axes.set_xticks(range(len(edges)), names, rotation=30)
    table = [["depth (tokens)", "blocks", "τ", "accepted", "τ, first 5 rollouts", "τ, last 5 rollouts"]]
    for name, edge in zip(names, edges, strict=True):
        ratios = [total[edge].block_efficiency, total[edge].acceptance_rate]
        ratios += [part.get(edge, DraftCounts()).block_efficiency for part in (first, last)]
        cells = ("-" if math.isnan(ratio) else f"{ratio:.3f}" for ratio in ratios)  # NaN: no blocks there
        table.append([name, str(total[edge].blocks), *cells])
    text = ", ".join(f"τ {tau:.2f} at {name}" for name, tau in zip(names, taus, strict=True))
    return Drawing(figure, f"{text} tokens.", table)


def speedups(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Predicted and measured speedup, by rollout and against each other (ER Eq. 1, E.4)."""
    known = _known(rollouts, "predicted_speedup", "measured_speedup")
    if not known:
        return None
    counts, predicted, measured = zip(*known, strict=True)
    figure, (left, right) = canvas(
        (_ROLLOUT, "speedup over autoregressive rounds (×)"), ("predicted speedup (×)", "measured speedup (×)")
    )
    left.plot(counts, predicted, color=ORANGE, linestyle="--", marker=".", label="predicted")
    left.plot(counts, measured, color=BLUE, marker=".", label="measured")
    left.axhline(1, color=GREY, linewidth=0.8)
    left.legend()
    bounds = [min(*predicted, *measured, 1.0), max(*predicted, *measured, 1.0)]
    right.plot(bounds, bounds, color=GREY, linewidth=0.8)
    right.axhline(1, color=GREY, linewidth=0.5, linestyle=":")
    right.axvline(1, color=GREY, linewidth=0.5, linestyle=":")
    right.scatter(predicted, measured, color=BLUE, s=16)
    pairs = list(zip(predicted, measured, strict=True))
    mape = statistics.fmean(abs(p - m) / m for p, m in pairs if m)
    same_sign = statistics.fmean((p > 1) == (m > 1) for p, m in pairs)
    return Drawing(
        figure,
        f"predicted {statistics.fmean(predicted):.2f}×, measured {statistics.fmean(measured):.2f}× on average over "
        f"{len(known)} rollouts; mean error of the prediction {mape:.1%}; it was on the right side of 1 in "
        f"{same_sign:.0%} of them.",
    )


def rank_seconds(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Seconds of decoding by rank and rollout, below the rollout's seconds (SA Fig. 2a)."""
    shared = [record for record in rollouts if len(record.rank_seconds) > 1]
    if not shared:
        return None
    figure, (axes,) = canvas((_ROLLOUT, "seconds"))
    counts = [record.rollout for record in shared]
    axes.plot(counts, [record.seconds for record in shared], color=GREY, label="until the last rank was done")
    for rank in range(max(len(record.rank_seconds) for record in shared)):
        points = [(r.rollout, r.rank_seconds[rank]) for r in shared if rank < len(r.rank_seconds)]
        axes.plot(*zip(*points, strict=True), ".", markersize=3, label=f"rank {rank} decoded" if rank < 8 else None)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    idle = statistics.fmean(record.idle_share or 0.0 for record in shared)
    moved = sum(record.moved_rows for record in shared)
    ranks = len(shared[-1].rank_seconds)
    return Drawing(
        figure, f"{ranks} ranks had nothing to decode in {idle:.1%} of their time; {moved} rows moved between ranks."
    )


def verdict_of_run(run: Run) -> Drawing | None:
    """Speedup over plain decoding by rollout, and the seconds saved so far. None without estimates for plain
    decoding."""
    rollouts = run.of("train")
    if all(record.plain_seconds is None for record in rollouts):
        return None
    verdict, saved = verdict_of(run)
    counts = [record.rollout for record in rollouts]
    speedups = [record.speedup for record in rollouts]
    figure, (left, right) = canvas((_ROLLOUT, "speedup over plain decoding (×)"), (_ROLLOUT, "seconds saved so far"))
    left.axhline(1, color=GREY, linewidth=0.8)
    left.plot(counts, speedups, color=GREY, linewidth=0.8)
    size = 6 if len(counts) < 60 else 3
    for drafted, colour, label in ((True, BLUE, "drafted"), (False, VERMILLION, "decoded plainly")):
        if places := [at for at, record in enumerate(rollouts) if bool(record.sd_on_fraction) == drafted]:
            xs, ys = [counts[at] for at in places], [speedups[at] for at in places]
            draw_line(left, xs, ys, color=colour, linestyle="", marker=".", markersize=size, label=label)
    highest = max([1.0, *filter(math.isfinite, speedups)])
    left.set(title="each rollout, refresh included", ylim=(0, 1.15 * highest))
    left.legend(loc="lower right")
    edges, heights = [counts[0] - 1, *counts], [-verdict.calibration_seconds, *saved]
    right.axhline(0, color=GREY, linewidth=0.8)
    draw_line(right, edges, heights, color=BLUE)
    for sign, colour in ((1, GREEN), (-1, VERMILLION)):
        where = [sign * height >= 0 for height in heights]
        right.fill_between(edges, heights, where=where, interpolate=True, color=colour, alpha=0.3, linewidth=0)
    right.set_title(f"begins at {heights[0]:,.1f} s (probe or calibration), ends at {heights[-1]:,.1f} s")
    return Drawing(figure, str(verdict))
