"""The plan over rounds: what was drafted, by whom, for how many rows."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..generation.engine.statistics import PlanChange, RoundPoint
from ..trainers.run_log import RolloutRecord
from .figures import PALE, Drawing, canvas, drafter_colour, percent, spread


_PLAIN = "autoregressive"
_SHOWN = 0.01  # share of all rounds from which the table has a plan


def plans_over_rounds(rollouts: Sequence[RolloutRecord]) -> Drawing | None:
    """Of the first, middle and last rollout: rows in flight over rounds, a colour per drafter, stripes of both where
    two drafted, the darker the longer their drafts; and what all rollouts' rounds of each plan did."""
    drawn = [record for record in rollouts if record.points and _is_known(record.speculating)]
    if not drawn:
        return None
    points = [point for record in drawn for point in record.points]
    longest = max(1, *(point.draft_length for point in points))
    shown = spread(drawn)
    figure, panels = canvas(*[("decoding round (rank 0)", "rows in flight")] * len(shown), per_row=3, width=3.6)
    names: dict[str, None] = {}
    for axes, record in zip(panels, shown, strict=True):
        corners, colours = [], []
        for change, (end, *_) in pairwise([*record.speculating, PlanChange(record.rounds, 0)]):
            stripes = _drafters(change)
            for at, name in enumerate(stripes):
                low, high = (change.rows * edge / len(stripes) for edge in (at, at + 1))  # type: ignore[operator]
                corners.append([(change.round, low), (end, low), (end, high), (change.round, high)])
                colours.append(_colour(name, change.draft_length / longest))
                names[name] = None
        axes.add_collection(PolyCollection(corners, facecolor=colours, edgecolor="none"))
        most = max(change.rows or 0 for change in record.speculating)
        axes.set(title=f"rollout {record.rollout}", xlim=(0, record.rounds), ylim=(0, 1.05 * most))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles = [Patch(color=_colour(name, 1.0), label=name) for name in names]
    title = f"the darker, the longer\nthe draft (up to γ = {longest})" if set(names) != {_PLAIN} else None
    panels[-1].legend(handles=handles, title=title, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    rounds = sum(point.rounds for point in points)
    shares: dict[str, float] = {}
    for point in points:
        who = "+".join(_drafters(point))
        shares[who] = shares.get(who, 0.0) + point.rounds / rounds
    said = "".join(f"; rollout {record.rollout}: {record.reason}" for record in shown if record.reason)
    return Drawing(figure, f"{percent(shares)} of all rounds{said}.", _table(points, rounds))


def _is_known(changes: Sequence[PlanChange]) -> bool:
    return bool(changes) and changes[0].rows is not None


def _drafters(plan: PlanChange | RoundPoint) -> list[str]:
    return (plan.drafter or "?").split("+") if plan.draft_length else [_PLAIN]


def _colour(name: str, share: float) -> tuple[float, ...]:
    """Of a drafter whose γ is this share of the longest."""
    if name == _PLAIN:
        return to_rgb(PALE)
    return tuple(1 - (0.35 + 0.65 * share) * (1 - part) for part in to_rgb(drafter_colour(name)))


def _table(points: Sequence[RoundPoint], rounds: int) -> list[list[str]]:
    """What the rounds of each plan did, but for those that were seldom."""
    by_plan: dict[tuple[str, int], list[RoundPoint]] = {}
    for point in points:
        by_plan.setdefault(("+".join(_drafters(point)), point.draft_length), []).append(point)
    table = [["who drafts", "γ", "share of rounds", "mean rows", "tokens per row and round", "tokens/s"]]
    for (who, draft_length), own in sorted(by_plan.items(), key=lambda item: (item[0][1] > 0, item[0])):
        count, tokens = sum(point.rounds for point in own), sum(point.tokens for point in own)
        rows, seconds = sum(point.rounds * point.batch for point in own), sum(point.seconds for point in own)
        if count >= _SHOWN * rounds:
            speed = f"{tokens / seconds:.0f}" if seconds else "-"
            cells = [f"{count / rounds:.1%}", f"{rows / count:.1f}", f"{tokens / rows:.2f}", speed]
            table.append([who, str(draft_length), *cells])
    return table
