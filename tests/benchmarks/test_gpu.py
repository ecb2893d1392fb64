"""The GPU benchmark, as far as a CPU can show: what fails is named, and what no GPU measured counts for nothing. That
every stage runs on a tiny shape is in test_smoke. No test looks at a time."""

import json
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import smoke, summary
from benchmarks.gpu.outcomes import Outcomes
from benchmarks.gpu.quarter import STAGES
from benchmarks.gpu.stage import Stage
from tests.conftest import tiny_llama


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu/quarter.sh"


def tried(folder: Path) -> Stage:
    return Stage(None, ["tried"], ["tried", "--tiny", "--output", str(folder)])


def test_a_failure_is_kept_with_its_error_and_the_stage_goes_on(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such kernel")

    stage = tried(tmp_path)
    assert stage.measure("two", lambda: math.nan) is not None
    assert stage.measure("three", lambda: 3.0, needs=math.inf) is None
    assert stage.finish() == 0
    assert stage.measure("one", broken) is None
    stage.measure("four", lambda: {"ok": False})
    killed = json.loads((tmp_path / "tried.json").read_text())  # as if it were now
    assert killed["status"] == "unfinished" and killed["failed"] == ["four", "one"]
    assert stage.finish() == 1
    found = json.loads((tmp_path / "tried.json").read_text())
    assert found["errors"]["one"].startswith("RuntimeError: no such kernel")
    assert found["measured"] == {"two": None, "four": {"ok": False}}  # JSON knows no NaN
    assert found["skipped"]["three"].startswith("no time left")
    assert found["status"] == "complete, with gaps" and found["failed"] == ["four", "one"]


# ---- is it right? ---------------------------------------------------------------------------------------------------


def test_a_case_fails_where_nothing_was_drafted_or_log_probabilities_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tried(tmp_path)
    make = lambda: tiny_llama(max_position_embeddings=512)  # noqa: E731
    smoke.check_case(stage, "drafts", make, "self", bits="same")
    smoke.check_case(stage, "drafts nothing", make, "self", {"sd_toggle": "never"})
    smoke.check_case(stage, "other bits", make, "self", {"seed": 1}, bits="same")
    monkeypatch.setattr(smoke, "off", lambda *_: (0.02, 1e-4))
    smoke.check_case(stage, "off", make, "self")
    right = {name: found["ok"] for name, found in stage.found.items()}
    assert right == {"drafts": True, "drafts nothing": False, "other bits": False, "off": False} and not stage.errors
    assert stage.found["drafts"]["drafted"] > 0 == stage.found["drafts nothing"]["drafted"]
    assert stage.found["drafts nothing"]["same_rows"] == [7, 7] != stage.found["other bits"]["same_rows"]


def test_warnings_that_fail_a_case_are_given_somewhere() -> None:
    source = "".join(path.read_text() for path in (ROOT / "spec_trl").rglob("*.py"))
    assert [words for words in smoke.GIVEN_UP if words not in source] == []


# ---- the summary ----------------------------------------------------------------------------------------------------


def result(stage: str, measured: dict[str, Any], accelerator: str | None = "a GPU") -> dict[str, Any]:
    return {"stage": stage, "seconds": 9.0, "machine": {"accelerator": accelerator}, "measured": measured}


def test_predictions_stand_beside_what_a_gpu_measured() -> None:
    cell = {"none": {"tokens_per_second": 302.0}, "self": {"over_none": 1.5, "calls": 2}, "T_q, ms": 2.0}
    stages = {
        "headline": result("headline", {"qwen2.5-7b, B 1": cell, "another": {"T_p, ms": 3.0, "ok": True}}),
        "grpo": result("grpo", {"TRL, over ours": {"rollout": 24.0, "step": 2.0}}),
        "static": result("static", {"qwen2.5-7b, B 8": {"static, compiled": {"over_none": 9.0}}}, None),
    }
    rows = {(row.stage, row.what): row for row in summary.figures(stages)}
    factors = {what: row.factor for (_, what), row in rows.items() if row.factor is not None}
    assert factors.pop("qwen2.5-7b, B 1, none, tokens_per_second") == 2.0
    assert factors.pop("qwen2.5-7b, B 1, self, over_none") == 1.0  # in the range
    assert factors.pop("TRL, over ours, rollout") == 2.0 and factors.pop("TRL, over ours, step") == 0.5
    assert factors.pop("qwen2.5-7b, B 1, T_q, ms") == 0.8 and factors.keys() == {"seconds"}
    assert rows["headline", "another, T_p, ms"].predicted is None  # listed all the same
    assert rows["static", "qwen2.5-7b, B 8, static, compiled, over_none"].measured is None
    assert summary.other_cards(stages) == "Predictions are for NVIDIA H100 80GB HBM3; measured on a GPU.\n\n"
    assert not summary.other_cards({"static": stages["static"], "grpo": result("grpo", {}, "NVIDIA H100 80GB HBM3")})
    empty = summary.table(summary.figures({}))
    assert "| headline | qwen2.5-7b, B 8, self, over_none | 1.4 to 1.65 | – | – |" in empty


# ---- tests of kernels -----------------------------------------------------------------------------------------------


def report(name: str, when: str, outcome: Any, text: str = "") -> pytest.TestReport:
    return pytest.TestReport(f"tests/a.py::{name}", ("", 0, ""), {}, outcome, text, when)  # type: ignore[arg-type]


def test_outcomes_are_kept_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.outcomes.EVERY", 0.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    kept = Outcomes(tmp_path / "kernels.json")
    for each in (
        report("one", "setup", "passed"), report("one", "call", "passed"), report("two", "call", "failed", "1 != 2"),
        report("three", "setup", "skipped"), report("four", "setup", "failed", "no fixture"),
    ):  # fmt: skip
        kept.pytest_runtest_logreport(each)
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["status"] == "unfinished" and found["failed"] == ["tests/a.py::two", "tests/a.py::four"]
    assert found["measured"]["tests"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert found["errors"]["tests/a.py::two"] == "1 != 2"
    kept.pytest_sessionfinish(1)
    stages = summary.read_stages(tmp_path)
    assert stages["kernels"]["status"] == "complete"
    (seconds,) = (row for row in summary.figures(stages) if row.stage == "kernels")
    assert seconds.predicted and seconds.measured is not None


# ---- the script -----------------------------------------------------------------------------------------------------


def script(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"PYTHON": sys.executable, "OUT": str(folder / "out"), "QUARTER_CACHE": str(folder / "cache")}
    command, environment = ["bash", str(SCRIPT), *arguments], os.environ | own | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=99)


def test_two_commands_fit_and_name_stages_that_exist() -> None:
    plans = dict(re.findall(r'\[(\w+)\]="([^"]+)"', SCRIPT.read_text()))
    limits = {name: dict(each.split("=") for each in plan.split()) for name, plan in plans.items()}
    seconds = [sum(map(int, stages.values())) for stages in limits.values()]
    assert len(seconds) == 2 and max(seconds) <= 400 and sum(seconds) <= 720
    known = {*STAGES, "kernels", "sanitizer"}
    assert {*limits["first"], *limits["second"]} == known - {"exact", "sanitizer", "vllm"}
    assert set(re.findall(r"\^\(([^)]+)\)", SCRIPT.read_text())[0].split("|")) == known
    assert summary.figures({}) and {row.stage for row in summary.figures({})} <= known


@pytest.mark.parametrize("wrong", [[], ["smoke=a"], ["first", "second"]], ids=str)
def test_an_unknown_stage_is_refused(wrong: list[str], tmp_path: Path) -> None:
    refused = script(tmp_path, *wrong)
    assert refused.returncode == 2 and "is no stage; write first, second, or STAGE=SECONDS" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_stage_that_hangs_loses_nothing_but_itself(tmp_path: Path) -> None:
    """Instead of Python something that writes a result, and then hangs, or fails."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/usr/bin/env bash
        [ "$2" = benchmarks.gpu.summary ] && exec {sys.executable} "$@"
        [ "$2" = pip ] && exit
        stage=$(basename "$OUTCOMES" .json)
        result='"status": "unfinished", "seconds": 1, "measured": {{"a": 1}}, "failed": []'
        echo "{{\\"stage\\": \\"$stage\\", $result}}" >"$OUTCOMES"
        echo "[$stage] a: 1"
        case $stage in
        smoke) exec sleep 60 ;;
        headline) exit 3 ;;
        esac
        """
    )
    python.chmod(0o755)
    ran = script(tmp_path, "smoke=1", "headline=9", "grpo=9", PYTHON=str(python))
    assert ran.returncode == 1, ran.stderr
    for stage, rc in (("smoke", 124), ("headline", 3), ("grpo", 0)):
        assert f"[{stage}] a: 1\n== {stage}: rc {rc}, " in ran.stdout
        assert f"{stage}: unfinished, 1 s, no GPU known" in ran.stdout
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"smoke.json", "headline.json", "grpo.json", "logs.tar.gz"}
    with tarfile.open(tmp_path / "out/logs.tar.gz") as archive:
        assert {"./smoke.log", "./headline.log", "./grpo.log"} <= set(archive.getnames())


def test_nothing_of_an_earlier_run_is_left(tmp_path: Path) -> None:
    """New wheels are installed, and a stage that dies before it writes has no result."""
    python, wheel, old = tmp_path / "python", tmp_path / "wheels/a.whl", tmp_path / "out/grpo.json"
    python.write_text('#!/usr/bin/env bash\n[ "$2" != pip ] || echo installed >>"$0.log"\n')
    python.chmod(0o755)
    for folder in (wheel.parent, old.parent):
        folder.mkdir()
    old.write_text("{}")
    installed = []
    for content in ("one", "one", "two"):
        wheel.write_text(content)
        assert script(tmp_path, "grpo=9", PYTHON=str(python), WHEELS=str(wheel.parent)).returncode == 0
        installed.append(len(Path(f"{python}.log").read_text().split()))
    assert installed == [1, 1, 2] and not old.exists()
