"""``spec-trl report``: a page that stands alone, PNG files, a summary; and runs without data or without a profile."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spec_trl.cli.main import main
from spec_trl.generation.engine.timeline import RequestTimeline
from spec_trl.trainers.run_log import LOG_FILE, RoundPoint, RunLog, read_run
from tests.cli.sample_run import make_header, make_profile, make_rollout, write_run


class Page(HTMLParser):
    """Checks that tags close in order; collects headings, images and what would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.sources += [values[name] or "" for name in ("src", "href") if name in values]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


SECTIONS = 13


def test_report_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_profile().save(tmp_path / "profile.json")
    write_run(tmp_path, profile="profile.json")
    assert main(["report", str(tmp_path)]) == 0
    images = sorted(path.name for path in (tmp_path / "report").glob("*.png"))
    assert len(images) == SECTIONS
    text = (tmp_path / "report" / "report.html").read_text()
    assert not re.search(r"https?://", text) and "<script" not in text and "<link" not in text
    page = Page(text)
    pictures = [source for source in page.sources if source.startswith("data:image/png;base64,")]
    assert len(pictures) == SECTIONS
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert {"some & model", "some <CPU>, 2 threads", "[5, 7, 9]"} <= set(page.cells)
    printed = capsys.readouterr().out
    for expected in ("24 training rollouts, 1 of evaluation, 24 steps", "Pearson r = -", "rollout 60.0%", "γ = 9: "):
        assert expected in printed
    assert "Toggle boundary: γ = 5: " in printed and "profile gave" not in printed
    assert "Who drafted for whom: rollout 23, the slowest 4 of 64 requests" in printed
    rollouts = read_run(tmp_path).of("train")
    plain, took = sum(r.plain_seconds or 0.0 for r in rollouts), sum(r.seconds for r in rollouts)
    verdict = f"rollouts {plain / took:.2f}× of plain decoding, {plain - took:.1f} s saved (calibration and refresh "
    assert printed.splitlines()[1].startswith(f"Verdict: {verdict}")
    assert text.index("<img") > text.index(verdict) > text.index("<h2") == text.index('<h2 id="verdict">')


def test_a_run_without_speculation_says_so_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(strategy="none"))
    plain = make_rollout(
        0, strategy="none", drafter=None, block_efficiency=None, acceptance_rate=None, first_token_acceptance=None,
        predicted_speedup=None, measured_speedup=None, speculating=[(0, 0)], per_depth={}, points=[],
        timeline=[RequestTimeline(0, [(0.0, 0, [])], 1.0)], sd_on_fraction=0.0, plain_seconds=None, reason=None,
    )  # fmt: skip
    for index in range(3):
        log.append(replace(plain, rollout=index))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no training rollout speculated.") == 4
    assert "Verdict: nothing was drafted: rollouts were plain decoding." in printed  # an older log has no reason
    assert "Step time: no step was logged." in printed
    assert "Who drafted for whom: no rollout that speculated logged it." in printed
    assert "Toggle boundary: the run used no profile; name one with --profile." in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "completion.png", "report.html", "rollout_time.png", "speculation.png",
    ]  # fmt: skip
    Page((tmp_path / "out" / "report.html").read_text())


def test_a_run_that_never_speculated_shows_the_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_profile().save(tmp_path / "profile.json")
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(profile=str(tmp_path / "elsewhere" / "profile.json")))  # the folder was moved
    log.append(make_rollout(0, points=[RoundPoint(4, 500.0, 0, 30, 0.1, 120)]))
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Toggle boundary by the calibration's times at τ = γ: γ = 3: " in printed
    assert (tmp_path / "report" / "toggle_boundary.png").exists()


def test_only_a_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunLog(tmp_path / LOG_FILE).append(make_header(profile="gone.json"))
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "the run's profile gone.json is gone; name one with --profile." in printed
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["report.html"]


def test_a_killed_run_is_drawn_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, rollouts=4)
    path.write_text(path.read_text()[:-25])
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "is incomplete and left out" in captured.err
    assert "4 training rollouts, 0 of evaluation" in captured.out


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, rollouts=4)
    for arguments, message in (
        (["report", str(tmp_path / "nowhere")], "does not exist. Name the output_dir"),
        (["report", str(tmp_path), "--profile", str(tmp_path / "no.json")], "no.json: No such file"),
        (["report", str(tmp_path), "--profile", str(path)], "is not a valid roofline profile"),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    path.write_text(path.read_text().replace('"tokens"', '"tokns"', 1))
    assert main(["report", str(tmp_path)]) == 2
    assert "line 2 lacks ['tokens']" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_a_broken_profile_of_the_run_does_not_cost_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, rollouts=2, profile="profile.json")
    (tmp_path / "profile.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "warning: the run's own profile cannot be read" in captured.err
    assert "Toggle boundary: the run's profile cannot be read; name one with --profile." in captured.out
