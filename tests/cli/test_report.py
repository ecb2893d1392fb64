"""``spec-trl report``: a page that stands alone, PNG files, a summary; and runs without data or without a profile."""

import base64
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spec_trl.cli.main import main
from spec_trl.generation.engine.statistics import PlanChange, RequestTimeline, RoundPoint
from spec_trl.trainers.run_log import LOG_FILE, RunLog, read_run
from spec_trl.trainers.run_verdict import MORE
from tests.cli.sample_run import make_header, make_rollout


def page_of(text: str) -> ElementTree.Element:
    """The page as a tree; its tags must close in order."""
    return ElementTree.fromstring(re.sub(r"<((?:meta|img)[^>]*)>", r"<\1/>", text))


SECTIONS = 13


def test_report_of_a_run(report: tuple[Path, str]) -> None:
    folder, printed = report
    assert len(list((folder / "report").glob("*.png"))) == SECTIONS
    assert not list((folder / "report").glob("*.tmp"))
    text = (folder / "report" / "report.html").read_text()
    assert not re.search(r"https?://", text) and "<script" not in text and "<link" not in text
    page = page_of(text)
    pictures = [picture.attrib["src"] for picture in page.iter("img")]
    assert len(pictures) == SECTIONS and all(source.startswith("data:image/png;base64,") for source in pictures)
    assert base64.b64decode(pictures[0].partition(",")[2]) == (folder / "report" / "verdict.png").read_bytes()
    assert all(link.attrib["href"].startswith("#") for link in page.iter("a"))
    assert {"some & model", "some <CPU>, 2 threads", "[5, 7, 9]"} <= {cell.text for cell in page.iter("td")}
    for expected in (
        "24 training rollouts, 1 of evaluation, 24 steps",
        "Pearson r = -",
        "rollout 60.0%",
        "of all rounds; rollout 0: speculation predicted",
    ):
        assert expected in printed
    assert "Toggle boundary: γ = 5: " in printed and "profile gave" not in printed
    assert "Who drafted for whom: rollout 23, the slowest 4 of 64 requests" in printed
    rollouts = read_run(folder).of("train")
    plain, took = sum(r.plain_seconds or 0.0 for r in rollouts), sum(r.seconds for r in rollouts)
    verdict = f"rollouts {plain / took:.2f}× of plain decoding, {plain - took:.1f} s saved (refresh "
    assert printed.splitlines()[1].startswith(f"Verdict: {verdict}")
    assert text.index("<img") > text.index(verdict) > text.index("<h2") == text.index('<h2 id="verdict">')


def test_a_run_without_speculation_says_so_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(strategy="none"))
    plain = make_rollout(
        0, strategy="none", drafter=None, block_efficiency=None, acceptance_rate=None, first_token_acceptance=None,
        predicted_speedup=None, measured_speedup=None, per_depth={},
        speculating=[PlanChange(0, 0, 4)], points=[RoundPoint(4, 9.0, 0, None, 96, 9.6, 384)],
        timeline=[RequestTimeline(0, [(0.0, 0, [])], 1.0)], sd_on_fraction=0.0, plain_seconds=None, reason=None,
    )  # fmt: skip
    for index in range(3):
        log.append(replace(plain, rollout=index))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    # An older log has no reason.
    assert f"Verdict: nothing was drafted: rollouts were plain decoding. {MORE}" in printed
    left_out = next(line for line in printed.splitlines() if line.startswith("nothing to show for: "))
    assert left_out.split(": ")[1].split(", ") == [
        "Step time", "Reward", "Ranks", "Who drafted for whom", "Draft length and τ",
        "Entropy and first-token acceptance", "Entropy and block efficiency", "Block efficiency by output depth",
        "Predicted and measured speedup", "Toggle boundary",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "completion.png", "plan.png", "report.html", "rollout_time.png",
    ]  # fmt: skip
    titles = [heading.text for heading in page_of((tmp_path / "out" / "report.html").read_text()).iter("h2")]
    assert titles == ["Verdict", "Rollout time", "Completion curve", "Plan over rounds", "Settings"]


def test_a_run_that_never_speculated_shows_the_calibration(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile.json").write_bytes(profile.read_bytes())
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(profile=str(tmp_path / "elsewhere" / "profile.json")))  # the folder was moved
    assert main(["report", str(tmp_path)]) == 0
    assert "Toggle boundary by the calibration's times at τ = γ: γ = 3: " in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.html", "toggle_boundary.png"]


@pytest.mark.parametrize(
    ("profile_text", "torn", "said", "warned"),
    [
        (None, "", "the run's profile profile.json is gone; name one with --profile.", ""),
        ("{", "", "the run's profile cannot be read; name one with --profile.", "own profile cannot be read"),
        (None, '{"kind": "rollout", "mo', "0 training rollouts, 0 of evaluation", "is incomplete and left out"),
    ],
)
def test_a_log_of_a_header_without_a_good_profile_or_with_half_a_line(
    profile_text: str | None, torn: str, said: str, warned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(profile="profile.json"))
    with log.path.open("a") as file:
        file.write(torn)
    if profile_text is not None:
        (tmp_path / "profile.json").write_text(profile_text)
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert said in captured.out
    assert f"{warned}" in captured.err and captured.err.count("warning: ") == bool(warned)
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.html"]
