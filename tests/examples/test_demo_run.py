"""The demo from end to end, small, and what its table says."""

import json
from pathlib import Path

import pytest

from examples.demo import run
from spec_trl.generation.statistics import DraftCounts, SpeculationStatistics
from spec_trl.trainers.run_log import LOG_FILE, read_run


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in dict(
        OUTPUT=tmp_path / "out", STEPS=3, WINDOW=2, PROMPTS=6, REPEATS=1, CALIBRATION_SECONDS=0.5
    ).items():
        monkeypatch.setattr(run, name, value)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOG_FILE).write_text("no JSON\n")  # of an earlier demo, which is gone
    run.main()
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["history"]) == len(read_run(tmp_path / "out").of("train")) == 3
    r = result["entropy_acceptance_correlation"]
    assert f"Pearson r = {r:.2f}" in printed
    rows = {row["engine"]: row for row in result["comparison"]}
    assert list(rows) == ["transformers", "none", "self", "toggle"]
    assert rows["self"]["identical_rows"] == "6 of 6" and rows["self"]["speculative_rounds"] > 0.9
    assert rows["self"]["block_efficiency"] > 2
    assert rows["toggle"]["identical_rows"] == "6 of 6"
    assert "toggle: calibrated in" in printed and "Entropy and first-token acceptance" in printed
    for file in ("table.txt", "demo.png", "roofline_profile.json", "report/report.html", "report/toggle_boundary.png"):
        assert (tmp_path / "out" / file).stat().st_size > 100


def test_a_table_row_without_drafts_has_no_block_efficiency() -> None:
    drafted = SpeculationStatistics(
        "self", DraftCounts(8, 4, 2, 2, 1, 6), rounds=4, speculating=[(0, 0), (1, 5)], phase_seconds={"draft": 0.5}
    )
    idle = SpeculationStatistics("self", rounds=4, speculating=[(0, 0)], phase_seconds={"draft": 0.0})
    plain = run.Measurement([], [10.0], [1.0], [])
    measured = {
        "transformers": plain,
        "none": run.Measurement([], [10.0], [1.0], [idle]),
        "self": run.Measurement([], [20.0], [0.5], [drafted]),
        "toggle": run.Measurement([], [10.0], [1.0], [idle]),
    }
    rows = {row["engine"]: row for row in run.summarize(measured)}
    assert rows["self"]["speculative_rounds"] == 0.75 and rows["self"]["block_efficiency"] == 3.0
    assert rows["toggle"]["speculative_rounds"] == 0 and "block_efficiency" not in rows["toggle"]
    assert "speculative_rounds" not in rows["none"]
    table = run.format_table(list(rows.values())).splitlines()
    assert [line.split("  ")[0] for line in table[1:5]] == list(run.NAMES.values())
    assert " 75%  3.00     0.500" in table[3]
