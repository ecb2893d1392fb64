"""The log of a run: what is written is read back, and what a killed, resumed or edited run left is told apart."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spec_trl.trainers.run_log import LOG_FILE, RunLog, read_run
from tests.cli.sample_run import make_header, make_rollout, make_step, write_run


def edit(path: Path, number: int, change: Any) -> None:
    """Applies `change` to the JSON object in line `number` (from 1)."""
    lines = path.read_text().splitlines()
    data = json.loads(lines[number - 1])
    change(data)
    lines[number - 1] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=3)
    run = read_run(tmp_path)
    assert run == read_run(path)
    assert run.headers == [make_header()] and run.header == make_header()
    assert run.of("train") == [make_rollout(i) for i in range(3)]
    assert run.of("eval") == [make_rollout(0, mode="eval")]
    assert run.steps == [make_step(i) for i in (1, 2, 3)]


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(settings={"limit": math.inf}))
    log.append(make_rollout(0, block_efficiency=math.nan, sd_on_fraction=math.nan))
    text = log.path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    run = read_run(log.path)
    assert run.header.settings == {"limit": None}
    assert run.rollouts[0].block_efficiency is None and run.rollouts[0].sd_on_fraction is None


def test_a_log_that_is_older_than_a_field_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2, calibration_seconds=9.0)
    edit(path, 1, lambda d: d.pop("calibration_seconds"))
    for name in ("timeline", "reason", "plain_seconds"):
        edit(path, 4, lambda d, name=name: d.pop(name))
    assert read_run(path).header == make_header()
    first, second = read_run(path).of("train")
    assert first.timeline == make_rollout(0).timeline != []
    assert second == make_rollout(1, timeline=[], reason=None, plain_seconds=None)


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=3)
    whole = read_run(path)
    text = path.read_text()
    lines = text.splitlines()
    path.write_text(text[: -len(lines[-1]) // 2])  # the evaluation's
    with pytest.warns(UserWarning, match=f"line {len(lines)} is incomplete"):
        cut = read_run(path)
    assert cut.of("eval") == [] and cut.of("train") == whole.of("train") and cut.steps == whole.steps


def test_a_resumed_run_goes_on_behind_an_unfinished_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    path.write_text(path.read_text()[:-30])
    log = RunLog(path)
    log.append(make_header(started="later"))
    log.append(make_rollout(2))
    run = read_run(path)  # a warning would be an unfinished line in its middle
    assert [header.started for header in run.headers] == [make_header().started, "later"]
    assert [record.rollout for record in run.rollouts] == [0, 1, 2] and not run.of("eval")


def test_a_last_line_that_only_lacks_its_break_is_kept(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    path.write_text(path.read_text().rstrip("\n"))
    RunLog(path).append(make_step(3))
    run = read_run(path)
    assert len(run.of("eval")) == 1 and [step.step for step in run.steps] == [1, 2, 3]


def test_a_resumed_run_replaces_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=6)  # and one evaluation
    log = RunLog(path)
    log.append(make_header(started="later"))
    again = make_rollout(3, seed=1)
    log.append(again)
    log.append(make_step(4, reward=0.9))
    run = read_run(path)
    assert run.of("train") == [*(make_rollout(i) for i in range(3)), again]  # 4 and 5 are void: they led nowhere
    assert run.steps == [*(make_step(i) for i in (1, 2, 3)), make_step(4, reward=0.9)]
    assert run.of("eval") == [make_rollout(0, mode="eval")]
    assert run.header.started == "later"


def test_a_second_line_of_the_same_rollout_wins(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    log = RunLog(path)
    log.append(make_rollout(1, seed=5))
    assert read_run(path).of("train") == [make_rollout(0), make_rollout(1, seed=5)]


def test_a_run_killed_before_its_first_rollout_can_be_read(tmp_path: Path) -> None:
    RunLog(tmp_path / LOG_FILE).append(make_header())
    run = read_run(tmp_path)
    assert run.rollouts == [] and run.steps == []


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (2, lambda d: d.pop("tokens"), r"line 2 lacks \['tokens'\]"),
        (2, lambda d: d.update(colour=1), r"line 2 has unknown \['colour'\]"),
        (2, lambda d: d.update(seconds="fast"), r"line 2, seconds: has fast where a number belongs"),
        (2, lambda d: d.update(seconds=None), r"line 2, seconds: has None where a number belongs"),
        (2, lambda d: d.update(tokens=1.5), r"line 2, tokens: has 1.5 where an integer belongs"),
        (2, lambda d: d.update(tokens=True), r"line 2, tokens: has True where an integer belongs"),
        (2, lambda d: d.update(mode="test"), r"line 2 has mode='test'"),
        (2, lambda d: d.update(points=[{"batch": 1}]), r"line 2, points: lacks \['draft_length'"),
        (2, lambda d: d.update(points=[3]), r"line 2, points: has 3 where an object belongs"),
        (2, lambda d: d.update(speculating=[[1, 2, 3]]), r"line 2, speculating: has \[1, 2, 3\] where a list of 2"),
        (2, lambda d: d["timeline"][0].pop("request"), r"line 2, timeline: lacks \['request'\]"),
        (2, lambda d: d["timeline"][0].update(changes=[[0, []]]), r"line 2, timeline, changes: has .* a list of 3"),
        (2, lambda d: d.update(per_depth={"deep": {}}), r"line 2, per_depth: has deep where an integer belongs"),
        (2, lambda d: d.update(kind="rolout"), r"line 2 has no \"kind\""),
        (3, lambda d: d.update(phases=[]), r"line 3, phases: has \[\] where an object belongs"),
        (1, lambda d: d.update(version=2), r"line 1 has version=2. This spec_trl reads version 1"),
        (1, lambda d: d.update(kind=["header"]), r"line 1 has no \"kind\""),
    ],
)
def test_an_edited_line_is_named(number: int, change: Any, message: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    edit(path, number, change)
    with pytest.raises(ValueError, match=message) as error:
        read_run(path)
    assert str(path) in str(error.value)


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:40]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        read_run(path)


def test_a_log_without_its_beginning_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ValueError, match="line 1 comes before any header"):
        read_run(path)


def test_no_log_and_an_empty_log_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{LOG_FILE} does not exist. Name the output_dir"):
        read_run(tmp_path)
    (tmp_path / LOG_FILE).write_text("")
    with pytest.raises(ValueError, match="holds no record"):
        read_run(tmp_path)


def test_every_field_is_in_the_file(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=1)
    header, rollout, step = (json.loads(line) for line in path.read_text().splitlines()[:3])
    assert header == {"kind": "header", **asdict(make_header())}
    assert set(rollout) == {"kind", *asdict(make_rollout(0))}
    assert rollout["per_depth"]["512"]["blocks"] == 50 and rollout["speculating"] == [[0, 0], [36, 5]]
    assert step == {"kind": "step", **asdict(make_step(1))}
