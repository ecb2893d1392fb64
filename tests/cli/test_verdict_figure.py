"""The picture of the verdict, judged by its numbers."""

import math
from pathlib import Path

import pytest

from spec_trl.cli.verdict_figure import verdict_of_run
from spec_trl.trainers.run_log import LOG_FILE, RolloutRecord, RunLog, read_run
from spec_trl.trainers.verdict import verdict_of
from tests.cli.sample_run import make_header, make_rollout
from tests.cli.test_figures import drawn


def write(folder: Path, *rollouts: RolloutRecord) -> Path:
    log = RunLog(folder / LOG_FILE)
    log.append(make_header(calibration_seconds=2.0))
    for rollout in rollouts:
        log.append(rollout)
    return folder


def test_speedup_and_seconds_saved(tmp_path: Path) -> None:
    run = read_run(
        write(
            tmp_path,
            make_rollout(0, seconds=4.0, plain_seconds=6.0),
            make_rollout(1, seconds=4.0, plain_seconds=None),
            make_rollout(2, seconds=5.0, plain_seconds=5.0, sd_on_fraction=0.0),
        )
    )
    drawing = drawn(verdict_of_run(run))
    assert drawing.numbers["speedups"] == pytest.approx([1.5, math.nan, 1.0], nan_ok=True)
    assert drawing.numbers["saved"] == [0.0, 0.0, 0.0]
    assert drawing.text == str(verdict_of(run)[0])
    left, right = drawing.figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["drafted", "decoded plainly"]
    (line,) = [line for line in right.lines if len(line.get_xdata()) == 4]
    assert list(line.get_ydata()) == [-2.0, 0.0, 0.0, 0.0]  # what calibration took, before the first rollout


def test_no_picture_without_a_comparison(tmp_path: Path) -> None:
    assert verdict_of_run(read_run(write(tmp_path, make_rollout(0, plain_seconds=None)))) is None
    assert verdict_of_run(read_run(write(tmp_path / "empty"))) is None
