"""The log of a run: it is read back also from killed, resumed and edited runs."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from spec_trl.generation.engine.statistics import DraftCounts, PlanChange, RoundPoint
from spec_trl.trainers.run_log import LOG_FILE, PlainCall, RunLog, StepRecord, read_run
from tests.cli.sample_run import make_header, make_rollout, make_step, write_run


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=3)
    run = read_run(tmp_path)
    assert run == read_run(path)
    assert run.headers == [make_header()] and run.header == make_header()
    assert run.of("train") == [make_rollout(i) for i in range(3)]
    assert run.of("eval") == [make_rollout(0, mode="eval")]
    assert run.steps == [make_step(i) for i in (1, 2, 3)]
    header, rollout, step = (json.loads(line) for line in path.read_text().splitlines()[:3])
    assert header == {"kind": "header", **asdict(make_header())}
    assert set(rollout) == {"kind", *asdict(make_rollout(0))}
    assert rollout["per_depth"]["512"]["blocks"] == 50 and rollout["speculating"][3] == [36, 5, 8, "self"]
    assert step == {"kind": "step", **asdict(make_step(1))}
    RunLog(path).append(PlainCall("num_beams=4"))
    assert read_run(path).plain_calls == [PlainCall("num_beams=4")] and read_run(path).steps == run.steps


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path / LOG_FILE)
    log.append(make_header(settings={"limit": math.inf}))
    run = read_run(tmp_path)  # of a run that was killed before its first rollout
    assert run.header.settings == {"limit": None} and run.rollouts == [] and run.steps == []
    log.append(make_rollout(0, block_efficiency=math.nan, sd_on_fraction=math.nan))
    (record,) = read_run(tmp_path).rollouts
    assert record.block_efficiency is record.sd_on_fraction is None
    assert "NaN" not in log.path.read_text() and "Infinity" not in log.path.read_text()


@pytest.mark.parametrize("version", [{}, {"version": 1}])
def test_an_older_log_is_read(version: dict[str, int], tmp_path: Path) -> None:
    """What the first release wrote: seconds of points are means. A resumed run goes on in the newest version."""
    header = dict(
        kind="header", started="2026-11-01", hardware="CPU", model="m", dtype="float32", strategy="self",
        settings={"seed": 1}, profile=None, **version,
    )  # fmt: skip
    rollout = dict(
        kind="rollout", mode="train", rollout=0, step=0, strategy="self", drafter="self", seconds=2, tokens=60,
        refresh_seconds=0.5, requests=4, phase_seconds={"draft": 1.0}, block_efficiency=3.0, acceptance_rate=0.4,
        first_token_acceptance=0.6, target_entropy=1.2, draft_length=5, mean_draft_length=5.0, sd_on_fraction=1.0,
        predicted_speedup=None, measured_speedup=None, rounds=7, speculating=[[0, 5]], completion_curve=[[1.5, 4]],
        per_depth={"64": {"blocks": 20, "committed": 60, "drafted": 100, "accepted": 40}},
        points=[{"batch": 4, "length": 9.0, "draft_length": 5, "rounds": 7, "seconds": 0.2, "tokens": 60}],
    )  # fmt: skip
    step = dict(kind="step", step=1, seconds=3.0, phases={"rollout": 2.0}, reward=None)
    (tmp_path / LOG_FILE).write_text("".join(json.dumps(each) + "\n" for each in (header, rollout, step)))
    run = read_run(tmp_path)
    assert (run.header.calibration_seconds, run.header.settings) == (0.0, {"seed": 1})
    (record,) = run.rollouts
    assert record.per_depth == {64: DraftCounts(100, 40, 20, committed=60)}
    assert record.points == [RoundPoint(4, 9.0, 5, None, 7, 7 * 0.2, 60)] and record.completion_curve == [(1.5, 4)]
    assert record.speculating == [PlanChange(0, 5, None, None)]
    assert record.timeline == [] and record.reason is record.plain_seconds is None
    assert run.steps == [StepRecord(1, 3.0, {"rollout": 2.0}, None)] and run.header.version == 1
    log = RunLog(tmp_path / LOG_FILE)
    for written in (make_header(), make_rollout(1)):
        log.append(written)
    assert read_run(tmp_path).rollouts == [record, make_rollout(1)] and read_run(tmp_path).header.version == 2


def test_a_resumed_run_goes_on_after_an_unfinished_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=3)
    whole, text = read_run(path), path.read_text()
    path.write_text(text[:-30])  # of the evaluation
    with pytest.warns(UserWarning, match=f"line {len(text.splitlines())} is incomplete"):
        cut = read_run(path)
    assert (cut.of("eval"), cut.of("train"), cut.steps) == ([], whole.of("train"), whole.steps)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    log = RunLog(link)
    log.append(make_header(started="later"))
    log.append(make_rollout(3))
    run = read_run(path)  # a warning would be an unfinished line in its middle
    assert [header.started for header in run.headers] == [make_header().started, "later"]
    assert run.rollouts == [*whole.of("train"), make_rollout(3)]
    path.write_text(path.read_text().rstrip("\n"))  # a whole line is kept
    RunLog(path).append(make_step(4))
    assert read_run(path).rollouts == run.rollouts and read_run(path).steps == [*whole.steps, make_step(4)]


def test_a_resumed_run_replaces_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=6)  # and one evaluation
    log = RunLog(path)
    log.append(make_header(started="later"))
    for seed in (1, 2):  # of two lines of the same rollout the second wins
        log.append(make_rollout(3, seed=seed))
    log.append(make_step(4, reward=0.9))
    run = read_run(path)
    # Rollouts 4 and 5 are void: they led nowhere.
    assert run.of("train") == [*(make_rollout(i) for i in range(3)), make_rollout(3, seed=2)]
    assert run.steps == [*(make_step(i) for i in (1, 2, 3)), make_step(4, reward=0.9)]
    assert run.of("eval") == [make_rollout(0, mode="eval")] and run.header.started == "later"


def change(number: int, without: str = "", **fields: Any) -> Callable[[Path], None]:
    """Has the JSON object in line `number` (from 1) changed."""

    def edit(path: Path) -> None:
        lines = path.read_text().splitlines()
        data = json.loads(lines[number - 1]) | fields
        data.pop(without, None)
        lines[number - 1] = json.dumps(data)
        path.write_text("\n".join(lines) + "\n")

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(2, without="tokens"), "line 2: rollout.tokens: Field required"),
        (change(2, colour=1), "line 2: rollout.colour: Unexpected"),
        (change(2, seconds="fast"), r"line 2: rollout.seconds: .* valid number \(found 'fast'\)"),
        (change(2, mode="test"), r"line 2: rollout.mode: Input should be 'train' or 'eval' \(found 'test'\)"),
        (change(2, points=[{"batch": 1}]), r"line 2: rollout.points\[0\].length: Field required"),
        (change(2, timeline=[{"request": 0, "changes": [[0, []]]}]), r"line 2: rollout.timeline\[0\].changes\[0\]"),
        (change(2, kind="rolout"), "line 2: .*'rolout'.* 'header', 'rollout', 'step'"),
        (change(3, phases=[]), "line 3: step.phases: "),
        (change(1, version=3, colour=1), r"line 1: header.version: .* \(found 3\)"),
        (lambda path: path.write_text(path.read_text().replace('"phases"', '"phas', 1)), "line 3: Invalid JSON"),
        (lambda path: path.write_text(path.read_text().partition("\n")[2]), "line 1 comes before any header"),
        (lambda path: path.write_text(""), "holds no record"),
        (lambda path: path.unlink(), f"{LOG_FILE} does not exist. Name the output_dir"),
    ],
)
def test_a_damaged_log_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, rollouts=2)
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        read_run(tmp_path)
    assert str(path) in str(error.value)
