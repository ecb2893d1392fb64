"""Draws the speedup of drafting methods over acceptance (SA Fig. 10a)."""

from matplotlib.lines import Line2D

from ....cli.plotting import GREY, Drawing, canvas, changes, drafter_colour
from ....generation.planner.acceptance import Acceptance
from ..ladder import NO_METHOD, Ladder


_STEPS = 100  # of acceptance, from 0 to 1


def draft_ladder(ladder: Ladder) -> Drawing:
    """One panel per profiled batch: a method's speedup at its best γ over acceptance p, and its rungs as points.

    A rung is drawn at the speedup of its γ, p and times, so rungs of a worse γ are below the line. The text names for
    every batch the least p that makes a method faster than plain decoding, and the fastest method at equal p.
    """
    labels = [("acceptance p", "speedup over plain decoding (×)")] * len(ladder.batches)
    figure, panels = canvas(*labels, per_row=3, width=3.8, height=3.4)
    acceptances = [step / _STEPS for step in range(_STEPS + 1)]
    expected = [Acceptance.geometric(p).block_efficiency for p in acceptances]
    texts = []
    for axes, batch in zip(panels, ladder.batches, strict=True):
        rungs = [rung for rung in ladder.rungs if rung.batch == batch]
        methods = [method for method in ladder.methods if any(rung.method == method for rung in rungs)]
        axes.axhline(1, color=GREY, linewidth=1.2)
        wins, best, fastest = [], [1.0] * len(expected), [NO_METHOD] * len(expected)
        for method in methods:
            colour = drafter_colour(method)
            speedups = [ladder.best_draft_length(method, tau, batch)[1] for tau in expected]
            before = zip(speedups, best, fastest, strict=True)
            fastest = [method if speedup > most else name for speedup, most, name in before]
            best = [*map(max, speedups, best)]
            axes.plot(acceptances, speedups, color=colour)
            points = [(rung.acceptance, rung.speedup) for rung in rungs if rung.method == method]
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=3.5)
            losses = [at for at, speedup in enumerate(speedups) if speedup <= 1]
            won = acceptances[losses[-1] + 1 if losses else 0 :]
            wins.append(f"{method} from p = {won[0]:.2f}" if won else f"{method} at no p")
        axes.set(title=f"{batch} {'rows' if batch > 1 else 'row'}", xlim=(0, 1), ylim=(0, None))
        (_, first), *others = changes(acceptances, fastest)
        ranked = ", ".join([first, *(f"from {p:.2f} on {method}" for p, method in others)])
        texts.append(f"batch {batch}: faster than plain decoding: {', '.join(wins)}; fastest at equal p: {ranked}")
    handles = [Line2D([], [], color=drafter_colour(method), marker="o", label=method) for method in ladder.methods]
    handles.append(Line2D([], [], color=GREY, label=NO_METHOD))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return Drawing(figure, "; ".join(texts) + ".")
