"""The GPU benchmark, as far as a CPU can show: what fails is named, and what no GPU measured counts for nothing. That
every part runs on a tiny shape is in test_smoke. No test looks at a time."""

import json
import math
import os
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import checks, part, summary


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu/run_all.sh"


def test_a_failure_is_kept_with_its_error_and_the_part_goes_on(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such kernel")

    tried = part.Part("tried", None, ["--tiny", "--output", str(tmp_path)])
    assert tried.measure("one", broken) is None
    assert tried.measure("two", lambda: math.nan) is not None
    assert tried.measure("three", lambda: 3.0, needs=math.inf) is None
    assert tried.finish() == 0
    found = json.loads((tmp_path / "tried.json").read_text())
    assert found["errors"]["one"].startswith("RuntimeError: no such kernel")
    assert found["measured"] == {"two": None}  # JSON knows no NaN
    assert found["skipped"]["three"].startswith("no time left")
    assert found["status"] == "complete, with gaps"


# ---- the summary ----------------------------------------------------------------------------------------------------


def decoded(ratio: float, accelerator: str | None = "a GPU") -> dict[str, Any]:
    return {
        "part": "decode_default",
        "status": "complete",
        "machine": {"accelerator": accelerator},
        "measured": {f"default, B {b}": {"generate": {"over_plain": ratio}} for b in (1, 8, 32)},
    }


def by_name(rows: list[summary.Figure]) -> dict[str, summary.Figure]:
    return {row.what: row for row in rows}


def figure_in(folder: Path, what: str) -> dict[str, Any]:
    """As the folder's summary has it."""
    figures = json.loads((folder / summary.SUMMARY).read_text())["figures"]
    (found,) = (figure for figure in figures if figure["what"] == what)
    return found


def test_a_figure_is_met_or_not_or_not_run_and_only_a_gpu_counts() -> None:
    rows = by_name(summary.figures({"decode_default": decoded(2.7)}))
    assert [rows[f"none over generate, batch {b}"].met for b in (1, 8, 32)] == ["no", "no", "yes"]
    assert rows["none over generate, batch 1"].measured == 2.7
    refresh = rows["refresh, seconds, lm_head packed"]
    assert (refresh.met, refresh.measured) == ("not run", None)
    row = by_name(summary.figures({"decode_default": decoded(9.0, None)}))["none over generate, batch 1"]
    assert (row.met, row.measured) == ("tried out", None)


def test_the_worst_batch_and_the_faster_baseline_count() -> None:
    ratios: dict[str, Any] = {str(b): {"T_q / T_p": 0.3 + b / 100, "T_V / T_p": 1.0} for b in (1, 2, 4, 8)}
    ratios["32"] = {"T_q / T_p": None, "T_V / T_p": 9.0}
    batched = {"none": {}, "generate_batch": {"over_plain": 2.0}, "generate_batch, CUDA graphs": {"over_plain": 1.05}}
    gpu = {"accelerator": "a GPU"}
    parts = {
        "rounds": {"machine": gpu, "measured": {"head packed": {"ratios": ratios}}},
        "decode_batched": {"machine": gpu, "measured": {"batched, B 8": batched}},
    }
    rows = by_name(summary.figures(parts))
    assert rows["T_q / T_p, the worst of batch 1 to 8, lm_head packed"].measured == pytest.approx(0.38)
    assert rows["T_V(5) / T_p, the worst of batch 1 to 8"].met == "yes"
    assert rows["none over generate_batch, the faster of two ways, batch 8"].met == "no"
    assert rows["none over generate_batch, the faster of two ways, batch 1"].met == "not run"


# ---- checks ---------------------------------------------------------------------------------------------------------


def test_what_a_check_printed_is_read() -> None:
    whole = """
tests/a.py::test_one PASSED                                          [ 33%]
tests/a.py::test_two[{'window': 40}-x] FAILED                        [ 66%]
[gw3] [ 99%] ERROR tests/a.py::test_three
=========================== short test summary info ============================
FAILED tests/a.py::test_two[{'window': 40}-x] - AssertionError: 1 - 2
ERROR tests/a.py::test_three - ValueError
=================== 1 failed, 1 passed, 3 skipped, 1 error in 61.50s (0:01:01) ===================
"""
    found = checks.outcome(1, whole)
    assert found["failed"] == ["tests/a.py::test_two[{'window': 40}-x]", "tests/a.py::test_three"]
    assert found["counts"] == {"failed": 1, "passed": 1, "skipped": 3} and found["state"] == "failed"
    assert checks.outcome(checks.FOUND, "== 1 passed in 2.00s ==")["state"] == "failed"  # says the sanitizer
    interrupted = "[gw1] [ 20%] PASSED tests/a.py::test_one\n"
    assert checks.outcome(124, interrupted)["state"] == checks.outcome(-9, interrupted)["state"] == "out of time"
    assert checks.outcome(-9, interrupted + "[gw1] [ 30%] FAILED tests/a.py::test_two\n")["state"] == "failed"
    assert checks.outcome(0, "== 84 skipped, 70 deselected in 8.51s ==")["state"] == "no test"
    assert checks.outcome(0, "== 2 passed, 84 skipped in 8.51s ==")["state"] == "passed"


# ---- the scripts ----------------------------------------------------------------------------------------------------


PHASES = "right", "fast", "training"


def script(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"PYTHON": sys.executable, "GPU_BENCH_FOLDER": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=540,
    )


def test_without_time_the_script_says_so_for_every_part_and_each_can_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "decode_default.json").write_text(json.dumps(decoded(3.5)))
    ran = script(tmp_path, *PHASES, GPU_BENCH_SECONDS="0")
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / summary.SUMMARY).read_text())
    assert len(result["parts"]) == 11
    assert result["parts"]["grpo"]["status"] == "skipped: no time left"
    assert figure_in(tmp_path, "none over generate, batch 1")["measured"] == 3.5  # what an earlier run measured stays
    assert "none over generate, batch 1" in ran.stdout
    for name in result["parts"]:
        grouped = name.startswith(("decode_", "checks_"))
        module, _, group = name.partition("_") if grouped else (name, "", "")
        with pytest.raises(SystemExit) as ended:
            import_module(f"benchmarks.gpu.{module}").main([*(["--group", group] if group else []), "--help"])
        assert ended.value.code == 0
        assert not group or group in capsys.readouterr().out


@pytest.mark.slow
def test_a_command_gives_one_archive_and_one_summary(tmp_path: Path) -> None:
    out, folder, parts = tmp_path / "out", tmp_path / "kept", {"rounds", "decode_default", "speculation"}
    ran = script(folder, "fast", OUT=str(out), GPU_BENCH_ARGS="--tiny")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(path.name for path in out.iterdir()) == ["results.tar.gz", summary.SUMMARY]
    with tarfile.open(out / "results.tar.gz") as archive:
        names = archive.getnames()
    assert {"./summary.json", *(f"./{part}.{end}" for part in parts for end in ("json", "log"))} <= set(names)
    assert not any("cache" in name for name in names)
    result = json.loads((out / summary.SUMMARY).read_text())
    assert result["parts"].keys() == parts and all(result["parts"][part]["measured"] for part in parts)


@pytest.mark.slow
def test_the_script_knows_its_parts_and_goes_on_after_one_that_fails(tmp_path: Path) -> None:
    failing = script(tmp_path, "grpo", "checks_kernels", PYTHON="false")
    assert failing.returncode == 1 and "grpo: rc 1" in failing.stdout
    assert json.loads((tmp_path / "grpo.json").read_text())["status"] == "failed, rc 1"
    assert (tmp_path / "checks_kernels.failed").exists() and (tmp_path / "results.tar.gz").exists()
    for wrong in (["decode"], []):
        unknown = script(tmp_path, *wrong)
        assert unknown.returncode == 2 and "is unknown; choose right, fast or training" in unknown.stderr
