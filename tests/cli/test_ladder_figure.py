"""Fig. 10a: lines, points and crossings of a ladder whose round times are round numbers."""

import io
import json
from pathlib import Path

import pytest

from spec_trl.cli.figures import drafter_colour
from spec_trl.cli.ladder_figure import draft_ladder
from spec_trl.cli.main import main
from spec_trl.scheduling.ladder import Ladder, Rung
from tests.cli.sample_run import make_profile


SECONDS = {("ngram", 1): (1.305, 2.105), ("self", 1): (1.605, 1.805), ("self", 4): (3.5, 10.0)}
"""Of rounds of γ = 1 and γ = 4, by method and batch, beside an autoregressive second."""
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


def test_crossings_are_where_the_lines_cross() -> None:
    numbers = draft_ladder(LADDER).numbers["batches"]
    assert list(numbers) == [1, 4]
    grid = [step / 100 for step in range(101)]
    speedups = {
        method: [max(tokens(p, 1) / one, tokens(p, 4) / four) for p in grid]
        for method, (one, four) in (("ngram", SECONDS["ngram", 1]), ("self", SECONDS["self", 1]))
    }
    wins = {method: next(p for p, s in zip(grid, own, strict=True) if s > 1) for method, own in speedups.items()}
    assert numbers[1]["wins_from"] == wins == {"ngram": 0.31, "self": 0.46}
    crossing = next(p for p, n, s in zip(grid, *speedups.values(), strict=True) if p > 0.4 and s > n)
    assert numbers[1]["fastest"] == [(0.0, "none"), (0.31, "ngram"), (crossing, "self")]
    longer = next(p for p in grid if tokens(p, 4) / 2.105 > tokens(p, 1) / 1.305)
    assert numbers[1]["draft_lengths"]["ngram"] == [(0.0, 1), (longer, 4)]
    # Nobody wins among four rows: not even 2 tokens of 3.5 seconds, or 5 of 10; and lookups were not profiled there.
    assert numbers[4] == {
        "wins_from": {"self": None}, "fastest": [(0.0, "none")], "draft_lengths": {"self": [(0.0, 1)]},
    }  # fmt: skip


def test_a_method_wins_from_where_it_no_longer_loses() -> None:
    """Faster at p = 0 than at 0.5, where its rounds take twice as long."""
    rungs = [Rung("ngram", 1, 1, p, seconds, 1.0) for p, seconds in ((0.0, 0.5), (0.5, 2.0), (1.0, 1.0))]
    numbers = draft_ladder(Ladder(tuple(rungs), "")).numbers["batches"][1]
    assert numbers["fastest"][0] == (0.0, "ngram") and len(numbers["fastest"]) == 3
    assert numbers["wins_from"]["ngram"] == numbers["fastest"][2][0] > 0.5


def test_lines_points_and_text() -> None:
    drawing = draft_ladder(LADDER)
    first, second = drawing.figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["1 row", "4 rows"]
    plain, line, points, *_ = first.get_lines()
    assert list(plain.get_ydata()) == [1, 1]
    assert line.get_color() == points.get_color() == drafter_colour("ngram") != drafter_colour("self")
    assert len(line.get_xdata()) == 101 and line.get_ydata()[-1] == pytest.approx(5 / 2.105)
    found = sorted(zip(points.get_xdata(), points.get_ydata(), strict=True))
    expected = sorted((p, tokens(p, g) / s) for g, s in ((1, 1.305), (4, 2.105)) for p in (0.25, 0.75))
    assert [x for x, _ in found] == [x for x, _ in expected]
    assert [y for _, y in found] == pytest.approx([y for _, y in expected])
    assert drawing.text.startswith(
        "batch 1: faster than plain decoding: ngram from p = 0.31, self from p = 0.46; "
        "fastest at equal p: none, from 0.31 on ngram, from "
    )
    assert drawing.text.endswith("batch 4: faster than plain decoding: self at no p; fastest at equal p: none.")
    drawing.figure.savefig(io.BytesIO(), format="png")


# ---- the command --------------------------------------------------------------------------------------------------


def test_plot_draws_a_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LADDER.save(tmp_path / "my.ladder.json")
    assert main(["plot", "--ladder", str(tmp_path / "my.ladder.json"), "-o", str(tmp_path / "l.svg")]) == 0
    assert (tmp_path / "l.svg").read_bytes().startswith(b"<?xml")
    assert draft_ladder(LADDER).text in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "--ladder", "my.ladder.json"]) == 0
    assert Path("ladder.png").read_bytes().startswith(b"\x89PNG")


def test_plot_refuses_what_does_not_go_with_a_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder, profile, out = tmp_path / "a.ladder.json", tmp_path / "profile.json", tmp_path / "out.png"
    LADDER.save(ladder)
    make_profile().save(profile)
    (tmp_path / "old.json").write_text(json.dumps(json.loads(ladder.read_text()) | {"version": 0}))
    both = ["--ladder", str(ladder)]
    for arguments, message in (
        ([], "PROFILE is missing; name one that `spec-trl calibrate` wrote, or give --ladder"),
        ([str(profile), *both], "leave out PROFILE, or leave out --ladder"),
        ([*both, "--csv", "x", "--acceptance", "0.5"], "leave out --csv, --acceptance, or leave out --ladder"),
        ([*both, "--acceptance", "0"], "leave out --acceptance, or"),
        ([*both, "--block-efficiency", "2"], "leave out --block-efficiency, or"),
        ([*both, "--draft-length", "3", "--margin", "0.05"], "leave out --draft-length, --margin, or"),
        (["--ladder", str(profile)], "profile.json is not a valid draft ladder"),
        (["--ladder", str(tmp_path / "old.json")], "version=0 where this release reads"),
        (["--ladder", str(tmp_path / "no.json")], "no.json: No such file"),
        ([*both, "-o", "ladder.gif"], "--output ladder.gif: the name must end in"),
    ):
        assert main(["plot", "-o", str(out), *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not out.exists()
