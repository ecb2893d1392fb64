"""The demo from end to end, small, and what its table and its last sentence say."""

import json
from pathlib import Path

import pytest

from examples.demo import run
from spec_trl.trainers.run_log import LOG_FILE, read_run


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    for name, value in dict(OUTPUT=output, STEPS=2, WINDOW=1, ROWS=16, MAX_COMPLETION_LENGTH=24).items():
        monkeypatch.setattr(run, name, value)
    output.mkdir()
    (output / LOG_FILE).write_text("no JSON\n")  # of an earlier demo, which is gone
    run.main()
    printed = capsys.readouterr().out
    assert printed.endswith((output / "table.txt").read_text())
    rows = json.loads((output / "result.json").read_text())["comparison"]
    assert {row["method"]: row["same_steps"] for row in rows} == {run.TRL: None, "none": 2, "history": 2, "auto": 2}
    speeds = [row["over_trl"] for row in rows]
    assert speeds == sorted(speeds, reverse=True) and 1.0 in speeds
    assert {row["method"]: row["drafting"] is not None for row in rows}["history"]
    log = read_run(output)
    assert log.header.strategy == "auto" and len(log.of("train")) == 2
    for file in ("demo.png", "report/report.html"):
        assert (output / file).stat().st_size > 100


def made_up(completions: list[list[list[int]]], seconds: float, rewards: list[float]) -> run.Training:
    return run.Training(completions, [9.0] + [seconds] * 2, 9.0, [{"reward": reward} for reward in rewards])


@pytest.mark.parametrize(
    ("changed", "same"), [(None, "in all steps"), (2, "in the first 2 of 3 steps"), (0, "in the first 0 of 3 steps")]
)
def test_the_sentence_claims_what_was_checked(
    changed: int | None, same: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STEPS", 3)
    monkeypatch.setattr(run, "WINDOW", 1)
    plain = [[[1, 2], [3, 4]] for _ in range(3)]
    drafted = [[[1, 2], [3, 5]] if step == changed else plain[step] for step in range(3)]
    trainings = {
        run.TRL: made_up([[[7] * 4]] * 3, 2.0, [0.5, 0.0, 0.75]),
        "none": made_up(plain, 1.0, [0.25, 0.0, 1.0]),
        "auto": made_up(drafted, 0.5, [0.25, 0.0, 1.0]),
    }
    rows = run.summarize(trainings)
    assert [(row["method"], row["over_trl"]) for row in rows] == [("auto", 4.0), ("none", 2.0), (run.TRL, 1.0)]
    table, sentence = run.format_table(rows), run.conclude(rows)
    assert [line.split("  ")[0] for line in table.splitlines()[1:4]] == ['"auto"', '"none"', run.TRL]
    assert "4.00 times as fast as TRL's GRPOTrainer" in sentence and same in sentence
    assert "from 0.25 to 1.00, and from 0.50 to 0.75 with TRL, whose sampler draws other texts" in sentence
