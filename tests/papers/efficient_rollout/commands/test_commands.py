"""``spec-trl predict``, ``validate`` and ``plot`` on a profile, on sweeps and on what the authors published."""

import itertools
import re
from pathlib import Path

import pytest

from spec_trl.cli.main import main
from spec_trl.generation.planner.acceptance import expected_block_efficiency
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.sweep import write_sweep
from spec_trl.papers.specactor.commands.ladder_figure import draft_ladder
from spec_trl.papers.specactor.ladder import Ladder
from tests.cli.sample_run import make_profile, make_roofline


def columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command prints that succeeds."""
    assert main(list(map(str, words))) == 0
    return capsys.readouterr().out


def test_predict_prints_what_the_roofline_says(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "1,8,64", "--length", "512", "--draft-length", "3,7", "--acceptance", "0.9"]
    _, header, *lines = run(capsys, "predict", profile, *arguments).splitlines()
    assert columns(header) == ["B", "S", "γ", "τ", "T_p ms", "T_q ms", "T_V ms", "speedup", "decision"]
    roofline, expected = make_roofline(), []
    for batch, gamma in itertools.product((1, 8, 64), (3, 7)):
        tau = expected_block_efficiency(0.9, gamma)
        times = roofline.target_seconds(batch, 512), roofline.draft_seconds(batch, 512)
        times += (roofline.verify_seconds(batch, 512, gamma),)
        speedup = roofline.speedup(batch, 512, tau, gamma)
        decision = "speculate" if speedup >= 1.05 else "autoregressive"
        row = [str(batch), "512", str(gamma), f"{tau:.2f}", *(f"{1e3 * time:.3f}" for time in times)]
        over = "autoregressive: the drafter serves 48 rows"
        expected.append([*row, f"{speedup:.3f}", over if batch == 64 else decision])
    assert [columns(line) for line in lines] == expected
    assert {row[-1] for row in expected[:4]} == {"speculate", "autoregressive"}


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ("--batch 1 --length 512 --block-efficiency 4 --margin 0.05", "  speculate"),
        ("--batch 1 --length 512 --block-efficiency 4 --margin 1", "  autoregressive"),
        ("--acceptance 0.9 --batch 64,1 --length 128,512", "  speculate"),
        (
            "--acceptance 0.9 --batch 1,128 --length 64,512,4096",
            "extrapolated: B = 128 (swept: 1 to 64); S = 64, 4096 (swept: 128 to 512)",
        ),
    ],
)
def test_the_margin_decides_and_what_is_extrapolated_is_said(
    options: str, ending: str, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "predict", profile, *options.split()).rstrip().endswith(ending)


def signs(printed: str, name: str) -> list[float]:
    """The two sign accuracies in the row called `name`."""
    line = next(line for line in printed.splitlines() if line.strip().startswith(name))
    return [float(share.rstrip("%")) for share in columns(line)[5:7]]


def test_refit_finds_the_roofline_that_made_the_times(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, new = tmp_path / "sweep.csv", tmp_path / "new.json"
    write_sweep(sweep, "shape", [s for s in make_profile().samples if s.batch in (1, 16)])
    printed = run(capsys, "validate", profile, "--csv", sweep, "--refit", "--bandwidth", "2.5e10", "-o", new)
    assert signs(printed, "fit, paper") == [100.0, 100.0] and signs(printed, "fit, improved") == [100.0, 100.0]
    paper = next(line for line in printed.splitlines() if "fit, paper" in line)
    assert all(float(error.rstrip("%")) < 0.5 for error in columns(paper)[1:5])
    written = Profile.load(new)
    assert written.key == make_profile().key and len(written.samples) == len(make_profile().samples) * 2 // 7
    assert f"written: {new} (fit, improved)" in printed


def test_plot_draws_a_boundary(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "plot", profile, "-o", tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "γ = 3: " in printed and "γ = 7: " in printed
    printed = run(capsys, "plot", profile, "-o", tmp_path / "c.png", "--draft-length", "7", "--acceptance", "0")
    assert "γ = 3: " not in printed and "γ = 7: 0 points beneficial, 14 harmful" in printed


def test_plot_draws_a_ladder(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert draft_ladder(Ladder.load(files["ladder"])).text in run(capsys, "plot", "--ladder", files["ladder"])
    assert Path("ladder.png").read_bytes().startswith(b"\x89PNG")
    run(capsys, "plot", "--ladder", files["ladder"], "-o", "l.svg")
    assert Path("l.svg").read_bytes().startswith(b"<?xml")
