"""``spec-trl predict``, ``validate`` and ``plot`` on a profile, on sweeps and on what the authors published."""

import re
from pathlib import Path

import pytest

from spec_trl.cli.ladder_figure import draft_ladder
from spec_trl.cli.main import main
from spec_trl.scheduling.draft_length import expected_block_efficiency
from spec_trl.scheduling.ladder import Ladder
from spec_trl.scheduling.profile import Profile
from spec_trl.scheduling.sweep import write_sweep
from tests.cli.sample_run import make_profile, make_roofline


def columns(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_predict_prints_what_the_roofline_says(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "1,8,64", "--length", "512", "--draft-length", "3,7", "--acceptance", "0.9"]
    assert main(["predict", str(profile), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [dict(zip(columns(lines[1]), columns(line), strict=True)) for line in lines[2:]]
    assert [(row["B"], row["γ"]) for row in rows] == [(b, g) for b in ("1", "8", "64") for g in ("3", "7")]
    roofline = make_roofline()
    for row in rows:
        batch, gamma = int(row["B"]), int(row["γ"])
        tau = expected_block_efficiency(0.9, gamma)
        assert float(row["τ"]) == pytest.approx(tau, abs=0.006)
        assert float(row["T_p ms"]) == pytest.approx(1e3 * roofline.target_seconds(batch, 512), abs=1e-3)
        assert float(row["T_q ms"]) == pytest.approx(1e3 * roofline.draft_seconds(batch, 512), abs=1e-3)
        assert float(row["T_V ms"]) == pytest.approx(1e3 * roofline.verify_seconds(batch, 512, gamma), abs=1e-3)
        speedup = roofline.speedup(batch, 512, tau, gamma)
        assert float(row["speedup"]) == pytest.approx(speedup, abs=1e-3)
        if batch == 64:
            assert row["decision"] == "autoregressive: the drafter serves 48 rows"
        else:
            assert row["decision"] == ("speculate" if speedup >= 1.05 else "autoregressive")
    assert {row["decision"] for row in rows if row["B"] != "64"} == {"speculate", "autoregressive"}


def test_the_margin_decides_and_what_is_extrapolated_is_said(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def predict(*options: str) -> str:
        assert main(["predict", str(profile), *options]) == 0
        return capsys.readouterr().out

    for margin, decision in (("0.05", "speculate"), ("1", "autoregressive")):
        printed = predict("--batch", "1", "--length", "512", "--block-efficiency", "4", "--margin", margin)
        assert columns(printed.splitlines()[-1])[-1] == decision
    inside = predict("--acceptance", "0.9", "--batch", "1,64", "--length", "128,512")
    outside = predict("--acceptance", "0.9", "--batch", "1,128", "--length", "64,512,4096")
    assert "extrapolated" not in inside
    assert "extrapolated: B = 128 (swept: 1 to 64); S = 64, 4096 (swept: 128 to 512)" in outside


def signs(printed: str, name: str) -> list[float]:
    """The two sign accuracies in the row called `name`."""
    line = next(line for line in printed.splitlines() if line.strip().startswith(name))
    return [float(share.rstrip("%")) for share in columns(line)[5:7]]


def test_refit_finds_the_roofline_that_made_the_times(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, new = tmp_path / "sweep.csv", tmp_path / "new.json"
    write_sweep(sweep, "shape", [s for s in make_profile().samples if s.batch in (1, 16)])
    arguments = ["validate", str(profile), "--csv", str(sweep), "--refit", "--bandwidth", "2.5e10", "-o", str(new)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert signs(printed, "fit, paper") == [100.0, 100.0] and signs(printed, "fit, improved") == [100.0, 100.0]
    paper = next(line for line in printed.splitlines() if "fit, paper" in line)
    assert all(float(error.rstrip("%")) < 0.5 for error in columns(paper)[1:5])
    written = Profile.load(new)
    assert written.key == make_profile().key and len(written.samples) == len(make_profile().samples) * 2 // 7
    assert f"written: {new} (fit, improved)" in printed


def test_plot_draws_a_boundary(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(profile), "-o", str(tmp_path / "b.png")]) == 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "γ = 3: " in printed and "γ = 7: " in printed
    assert main(["plot", str(profile), "-o", str(tmp_path / "c.png"), "--draft-length", "7", "--acceptance", "0"]) == 0
    printed = capsys.readouterr().out
    assert "γ = 3: " not in printed and "γ = 7: 0 points beneficial, 14 harmful" in printed


def test_plot_draws_a_ladder(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "--ladder", str(files["ladder"])]) == 0
    assert Path("ladder.png").read_bytes().startswith(b"\x89PNG")
    assert draft_ladder(Ladder.load(files["ladder"])).text in capsys.readouterr().out
    assert main(["plot", "--ladder", str(files["ladder"]), "-o", "l.svg"]) == 0
    assert Path("l.svg").read_bytes().startswith(b"<?xml")
