"""How fast which acceptance makes which method (SA Fig. 10a)."""

from typing import Any

from matplotlib.lines import Line2D

from ..scheduling.acceptance import Acceptance
from ..scheduling.ladder import NO_METHOD, Ladder
from .figures import GREY, Drawing, canvas, changes, drafter_colour


_STEPS = 100  # of acceptance, from 0 to 1


def draft_ladder(ladder: Ladder) -> Drawing:
    """One panel per profiled batch: each method's speedup at its best γ over acceptance p, and its rungs as points.

    A rung is drawn at the speedup that its own γ and p have by its own times, so those of a worse γ lie below the
    line. The numbers: "batches", by batch: "wins_from", by method the p from which on it is faster than plain decoding
    (None: not even at 1); "fastest", who is so at equal p: (p from which on, method), "none" among them;
    "draft_lengths", by method (p from which on, best γ).
    """
    figure, panels = canvas(len(ladder.batches), per_row=3, width=3.8, height=3.4)
    acceptances = [step / _STEPS for step in range(_STEPS + 1)]
    expected = [Acceptance.geometric(p).block_efficiency for p in acceptances]
    batches: dict[int, dict[str, Any]] = {}
    for axes, batch in zip(panels, ladder.batches, strict=True):
        rungs = [rung for rung in ladder.rungs if rung.batch == batch]
        methods = [method for method in ladder.methods if any(rung.method == method for rung in rungs)]
        best = {method: [ladder.best_draft_length(method, own, batch) for own in expected] for method in methods}
        axes.axhline(1, color=GREY, linewidth=1.2)
        for method, choices in best.items():
            colour = drafter_colour(method)
            axes.plot(acceptances, [speedup for _, speedup in choices], color=colour)
            points = [(rung.acceptance, rung.speedup) for rung in rungs if rung.method == method]
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=3.5)
        axes.set(title=f"{batch} {'rows' if batch > 1 else 'row'}", xlabel="acceptance p", xlim=(0, 1))
        axes.set(ylabel="speedup over plain decoding (×)", ylim=(0, None))
        wins: dict[str, float | None] = {}
        for method, choices in best.items():
            losses = [at for at, (_, speedup) in enumerate(choices) if speedup <= 1]
            wins[method] = next(iter(acceptances[losses[-1] + 1 if losses else 0 :]), None)
        fastest = [ladder.rank(dict.fromkeys(methods, own), batch)[0].method for own in expected]
        batches[batch] = {
            "wins_from": wins,
            "fastest": changes(acceptances, fastest),
            "draft_lengths": {m: changes(acceptances, [gamma for gamma, _ in best[m]]) for m in methods},
        }
    handles = [Line2D([], [], color=drafter_colour(method), marker="o", label=method) for method in ladder.methods]
    handles.append(Line2D([], [], color=GREY, label=NO_METHOD))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    text = "; ".join(_sentence(batch, found) for batch, found in batches.items())
    return Drawing(figure, {"batches": batches}, f"{text}.")


def _sentence(batch: int, found: dict[str, Any]) -> str:
    wins = ", ".join(f"{m} at no p" if p is None else f"{m} from p = {p:.2f}" for m, p in found["wins_from"].items())
    (_, first), *others = found["fastest"]
    fastest = ", ".join([first, *(f"from {p:.2f} on {method}" for p, method in others)])
    return f"batch {batch}: faster than plain decoding: {wins}; fastest at equal p: {fastest}"
