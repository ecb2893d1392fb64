"""Whether speculation helped: the run's verdict, and a picture of it."""

import math

from ..trainers.run_log import Run
from ..trainers.verdict import verdict_of
from .figures import BLUE, GREEN, GREY, VERMILLION, Drawing, canvas, draw_line


def verdict_of_run(run: Run) -> Drawing | None:
    """Speedup over plain decoding by rollout, and the seconds saved so far.

    The numbers: "speedups" by rollout (NaN: not known), and "saved" after each of them. None where no training rollout
    says what plain decoding would have taken.
    """
    rollouts = run.of("train")
    if all(record.plain_seconds is None for record in rollouts):
        return None
    verdict, saved = verdict_of(run)
    counts = [record.rollout for record in rollouts]
    speedups = [(record.plain_seconds or math.nan) / (record.seconds or math.nan) for record in rollouts]
    figure, (left, right) = canvas(2)
    left.axhline(1, color=GREY, linewidth=0.8)
    left.plot(counts, speedups, color=GREY, linewidth=0.8)
    for drafted, colour, label in ((True, BLUE, "drafted"), (False, VERMILLION, "decoded plainly")):
        own = [at for at, record in enumerate(rollouts) if bool(record.sd_on_fraction) == drafted]
        if own:
            draw_line(
                left, [counts[at] for at in own], [speedups[at] for at in own], color=colour, linestyle="", marker=".",
                markersize=6 if len(counts) < 60 else 3, label=label,
            )  # fmt: skip
    highest = max([1.0, *filter(math.isfinite, speedups)])
    left.set(xlabel="training rollout", ylabel="speedup over plain decoding (×)", ylim=(0, 1.15 * highest))
    left.set_title("each rollout, refresh included")
    left.legend(loc="lower right")
    edges, heights = [counts[0] - 1, *counts], [-verdict.calibration_seconds, *saved]
    right.axhline(0, color=GREY, linewidth=0.8)
    draw_line(right, edges, heights, color=BLUE)
    for sign, colour in ((1, GREEN), (-1, VERMILLION)):
        where = [sign * height >= 0 for height in heights]
        right.fill_between(edges, heights, where=where, interpolate=True, color=colour, alpha=0.3, linewidth=0)
    right.set(xlabel="training rollout", ylabel="seconds saved so far")
    right.set_title(f"begins at {heights[0]:,.1f} s (calibration), ends at {heights[-1]:,.1f} s")
    return Drawing(figure, {"speedups": speedups, "saved": saved}, str(verdict))
