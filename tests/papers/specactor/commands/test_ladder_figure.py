"""The figure of a draft ladder (SA Fig. 10a)."""

import numpy
import pytest

from spec_trl.cli.plotting import drafter_colour
from spec_trl.papers.specactor.commands.ladder_figure import draft_ladder
from spec_trl.papers.specactor.ladder import Ladder, Rung


SECONDS = {("ngram", 1): (1.305, 2.105), ("self", 1): (1.605, 1.805), ("self", 4): (3.5, 10.0)}
"""Of rounds of γ = 1 and γ = 4, by method and batch, where an autoregressive round takes one second."""
LADDER = Ladder(
    tuple(
        Rung(method, batch, gamma, p, seconds, 1.0)
        for (method, batch), both in SECONDS.items()
        for gamma, seconds in zip((1, 4), both, strict=True)
        for p in (0.25, 0.75)
    ),
    "some shape",
)


def tokens(p: float, gamma: int) -> float:
    return sum(p**k for k in range(gamma + 1))


def test_lines_of_the_best_draft_length_points_of_each_and_where_lines_cross() -> None:
    drawing = draft_ladder(LADDER)
    first, second = drawing.figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["1 row", "4 rows"]
    plain, *of_methods = first.get_lines()
    assert list(plain.get_ydata()) == [1, 1] and len(of_methods) == 4 and len(second.get_lines()) == 3
    grid, own = [step / 100 for step in range(101)], {}
    for method, line, points in zip(("ngram", "self"), of_methods[::2], of_methods[1::2], strict=True):
        one, four = SECONDS[method, 1]
        own[method] = [max(tokens(p, 1) / one, tokens(p, 4) / four) for p in grid]
        assert line.get_color() == points.get_color() == drafter_colour(method)
        assert list(line.get_ydata()) == pytest.approx(own[method])
        found = sorted(zip(points.get_xdata(), points.get_ydata(), strict=True))
        expected = sorted((p, tokens(p, gamma) / s) for gamma, s in ((1, one), (4, four)) for p in (0.25, 0.75))
        assert numpy.array(found) == pytest.approx(numpy.array(expected))
    crossing = next(p for p, n, s in zip(grid, *own.values(), strict=True) if p > 0.4 and s > n)
    # Nobody wins among four rows: not even 2 tokens of 3.5 seconds, or 5 of 10; and lookups were not profiled there.
    assert drawing.text == (
        "batch 1: faster than plain decoding: ngram from p = 0.31, self from p = 0.46; fastest at equal p: none, "
        f"from 0.31 on ngram, from {crossing:.2f} on self; batch 4: faster than plain decoding: self at no p; fastest "
        "at equal p: none."
    )


def test_a_method_wins_from_where_it_no_longer_loses() -> None:
    """Faster at p = 0 than at 0.5, where its rounds take twice as long."""
    rungs = [Rung("ngram", 1, 1, p, seconds, 1.0) for p, seconds in ((0.0, 0.5), (0.5, 2.0), (1.0, 1.0))]
    text = draft_ladder(Ladder(tuple(rungs), "")).text
    wins, _, ranked = text.partition("; fastest at equal p: ngram, from ")
    lost, _, won = ranked.partition(" on none, from ")
    assert wins.removeprefix("batch 1: faster than plain decoding: ngram from p = ") == won.removesuffix(" on ngram.")
    assert float(lost) < 0.5 < float(won.removesuffix(" on ngram."))
