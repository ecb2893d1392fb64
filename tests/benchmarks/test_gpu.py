"""The GPU benchmark, as far as a CPU can show: every part runs on a tiny shape, what fails is named, and what no GPU
measured counts for nothing. No test looks at a time."""

import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import machine, part, profiling, shapes, summary
from spec_trl.quantization.kernels import KERNELS


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu/run_all.sh"


def run(name: str, folder: Path, *more: str) -> dict[str, Any]:
    """The JSON of a part's run on the CPU."""
    module = import_module(f"benchmarks.gpu.{name}")
    assert module.main(["--device", "cpu", "--shape", "tiny", "--output", str(folder), *more]) == 0
    (found,) = (each for each in map(json.loads, map(Path.read_text, folder.glob("*.json"))) if "measured" in each)
    assert found["machine"]["accelerator"] is None
    return found


# ---- parts ----------------------------------------------------------------------------------------------------------


PARTS = {
    "machine": {"device", "versions", "copy_bandwidth", "gemm_bfloat16", "launch"},
    "kernels": {"gate_proj, up_proj | torch_int4"},
    "refresh": {"head packed", "head dense"},
    "decode --group default": {"default, B 2"},
    "decode --group runners": {"runners, B 2"},
}
SLOW_PARTS = {
    "decode --group batched": {"batched, B 2"},
    "decode --group static": {"static, B 2"},
    "attention": {"B 2, q 6, ragged"},
    "sampler": {"B 2, q 6"},
    "rounds": {"roofline", "head packed", "head dense"},
    "profiling": {"eager", "roofline"},
    "speculation": {"policy", "identity, float32", "self, always, B 1", "self, roofline, B 2"},
    "grpo": {"TRL", "none", "self", "profile", "lesson", "ratios"},
}


@pytest.mark.parametrize("command", [*PARTS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_PARTS)])
def test_a_part_runs_on_the_tiny_shape(command: str, tmp_path: Path) -> None:
    found = run(*command.split()[:1], tmp_path, *command.split()[1:])
    assert (PARTS | SLOW_PARTS)[command] <= found["measured"].keys() and not found.get("errors")
    for value in entries(found["measured"], "relative_error"):
        assert 0 <= value < 0.01
    if command in ("decode --group runners", "speculation"):
        equal = entries(found["measured"], "identical_rows")  # same engine, same noise, float by float
        assert equal and equal[0][0] == equal[0][1]


def entries(value: Any, key: str) -> list[Any]:
    """All that stands under `key`, however deep."""
    if not isinstance(value, dict):
        return []
    return [each for name, own in value.items() for each in ([own] if name == key else entries(own, key))]


def test_a_kernel_with_wrong_numbers_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == "torch_int4" and kernel.device_type == "cpu")
    right = kernel.linear
    monkeypatch.setattr(kernel, "linear", lambda self, x: right(self, x) * 1.1)
    rows = run("kernels", tmp_path)["measured"]["down_proj | torch_int4"]["by_rows"]
    assert all(row["wrong"] and row["relative_error"] == pytest.approx(0.1, rel=0.1) for row in rows.values())
    assert not any("packed" in row for row in rows.values())


# ---- what they share ------------------------------------------------------------------------------------------------


def test_kernels_of_a_profile_are_told_apart() -> None:
    kernels_run = [
        ("nvjet_tst_64x8_splitK_TNT", 0.0, 10.0),
        ("flash_fwd_splitkv_kernel", 10.0, 14.0),
        ("void at::native::elementwise", 12.0, 15.0),  # overlaps with the one before
        ("_merge_chunks", 20.0, 21.0),
    ]
    found = profiling.breakdown(kernels_run, rounds=2)
    assert found["busy_seconds"] == pytest.approx(16e-6 / 2)
    per_kind = {"weights": 5e-6, "attention": 2e-6, "sampling": 0.5e-6, "other": 1.5e-6}
    assert found["seconds"] == pytest.approx(per_kind)


def test_a_failure_is_kept_with_its_error_and_the_part_goes_on(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such kernel")

    tried = part.Part("tried", None, ["--device", "cpu", "--shape", "tiny", "--output", str(tmp_path)])
    assert tried.measure("one", broken) is None
    assert tried.measure("two", lambda: math.nan) is not None
    assert tried.measure("three", lambda: 3.0, needs=math.inf) is None
    assert tried.finish() == 0
    found = json.loads((tmp_path / "tried.json").read_text())
    assert found["errors"]["one"].startswith("RuntimeError: no such kernel")
    assert found["measured"] == {"two": None}  # JSON knows no NaN
    assert found["skipped"]["three"].startswith("no time left")
    assert found["status"] == "complete, with gaps"


def test_without_a_gpu_cuda_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        machine.main(["--output", str(tmp_path)])
    assert "--device cpu --shape tiny" in capsys.readouterr().err


def test_shapes() -> None:
    billions = {"qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77, "qwen2.5-0.5b": 0.49, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
                "llama-3.1-8b": 8.03, "tiny": 0.0}  # fmt: skip
    assert billions.keys() == shapes.CONFIGS.keys()
    for name, wanted in billions.items():
        with torch.device("meta"):
            model = shapes.AutoModelForCausalLM.from_config(shapes.config_of(name))
        weights = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
        assert weights / 1e9 == pytest.approx(wanted, abs=0.01), name
        assert model.config.eos_token_id is None
    with pytest.raises(ValueError, match="shape='qwen' is unknown"):
        shapes.config_of("qwen")


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


def test_a_figure_is_met_or_not_or_not_run_and_only_a_gpu_counts() -> None:
    rows = by_name(summary.figures({"decode_default": decoded(2.7)}))
    assert [rows[f"none over generate, batch {b}"].met for b in (1, 8, 32)] == ["no", "no", "yes"]
    assert rows["none over generate, batch 1"].measured == 2.7
    refresh_row = rows["refresh, seconds, lm_head packed"]
    assert (refresh_row.met, refresh_row.measured) == ("not run", None)
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
    assert rows["T_q / T_p, batch 1 to 8, lm_head packed"].measured == pytest.approx(0.38)
    assert rows["T_V(5) / T_p, batch 1 to 8"].met == "yes"
    assert rows["none over generate_batch, batch 8"].met == "no"
    assert rows["none over generate_batch, batch 1"].met == "not run"


def test_the_newest_folder_that_measured_counts(tmp_path: Path) -> None:
    folders = []
    for ratio in (2.0, 4.0, None):
        folders.append(tmp_path / str(ratio))
        folders[-1].mkdir()
        found = decoded(ratio or 0.0) | ({"measured": {}} if ratio is None else {})
        (folders[-1] / "decode_default.json").write_text(json.dumps(found))
    assert summary.main([*map(str, folders), "--quiet"]) == 0
    assert json.loads((folders[-1] / summary.SUMMARY).read_text())["figures"][0]["measured"] == 4.0


# ---- the script -----------------------------------------------------------------------------------------------------


def script(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), str(folder), *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_script_without_time_says_so_for_every_part(tmp_path: Path) -> None:
    (tmp_path / "decode_default.json").write_text(json.dumps(decoded(3.5)))
    ran = script(tmp_path, GPU_BENCH_SECONDS="0")
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / summary.SUMMARY).read_text())
    assert len(result["parts"]) == 14
    assert result["parts"]["grpo"]["status"] == "skipped: no time left"
    assert result["figures"][0]["measured"] == 3.5  # what an earlier run measured stays
    assert "none over generate, batch 1" in ran.stdout


@pytest.mark.slow
def test_the_script_runs_a_part_and_knows_their_names(tmp_path: Path) -> None:
    ran = script(tmp_path, "decode_runners", GPU_BENCH_ARGS="--device cpu --shape tiny")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads((tmp_path / "decode_runners.json").read_text())["measured"]
    failing = script(tmp_path, "refresh", PYTHON="false")
    assert failing.returncode == 1 and "refresh: rc 1" in failing.stdout
    assert json.loads((tmp_path / "refresh.json").read_text())["status"] == "failed, rc 1"
    unknown = script(tmp_path, "decode")
    assert unknown.returncode == 2 and "part 'decode' is unknown" in unknown.stderr
