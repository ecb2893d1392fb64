"""The GPU benchmark, as far as a CPU can show: every part runs on a tiny shape, what fails is named, and what no GPU
measured counts for nothing. No test looks at a time."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import (
    attention,
    decode,
    grpo,
    kernels,
    machine,
    part,
    profiling,
    rounds,
    sampler,
    shapes,
    speculation,
    summary,
)
from spec_trl.quantization.kernels import KERNELS


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu/run_all.sh"


def run(module: Any, folder: Path, *more: str) -> dict[str, Any]:
    """The JSON of a part's run on the CPU."""
    before = set(folder.glob("*.json"))
    assert module.main(["--device", "cpu", "--shape", "tiny", "--output", str(folder), *more]) == 0
    (written,) = {path for path in folder.glob("*.json") if "profile" not in path.name or module is profiling} - before
    found = json.loads(written.read_text())
    assert found["machine"]["accelerator"] is None
    return found


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_machine(tmp_path: Path) -> None:
    found = run(machine, tmp_path)
    assert set(found["measured"]) == {"device", "versions", "copy_bandwidth", "gemm_bfloat16", "launch"}
    assert found["measured"]["versions"]["torch"] == torch.__version__
    assert found["status"] == "complete"


def test_kernels_are_compared_with_the_reference(tmp_path: Path) -> None:
    found = run(kernels, tmp_path)["measured"]
    rows = found["gate_proj, up_proj | torch_int4"]["by_rows"]
    assert set(rows) == set(map(str, kernels.ROWS))
    assert all(0 < row["relative_error"] < 0.01 and row["speedup"] > 0 for row in rows.values())


def test_a_kernel_with_wrong_numbers_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == "torch_int4" and kernel.device_type == "cpu")
    right = kernel.linear
    monkeypatch.setattr(kernel, "linear", lambda self, x: right(self, x) * 1.1)
    rows = run(kernels, tmp_path)["measured"]["down_proj | torch_int4"]["by_rows"]
    assert all(row["wrong"] and row["relative_error"] == pytest.approx(0.1, rel=0.1) for row in rows.values())
    assert not any("packed" in row for row in rows.values())


@pytest.mark.slow
def test_attention(tmp_path: Path) -> None:
    found = run(attention, tmp_path)
    assert found["skipped"]["torch varlen"] == "needs a GPU"
    ragged = found["measured"]["B 2, q 6, ragged"]
    assert ragged["kv_bytes"] == (16 + 64) * 2 * 2 * 32 * 2  # tokens, K and V, heads, head dim, bytes
    expected = {"sdpa, additive mask", "flex_attention"} | ({"ours"} - found["skipped"].keys())
    assert set(ragged["methods"]) == expected, found["errors"]
    assert all(method["relative_error"] < 0.01 for method in ragged["methods"].values())


@pytest.mark.slow
def test_sampler(tmp_path: Path) -> None:
    found = run(sampler, tmp_path)
    drawn = found["measured"]["B 2, q 6"]
    assert drawn["rows"] == 12 and drawn["vocabulary"] == 512
    if "fused" not in found["skipped"]:
        assert drawn["same_tokens"] == 1.0 and drawn["score_error"] < 1e-4
        assert set(drawn["captured"]) == {"torch", "fused"}


@pytest.mark.slow
def test_rounds(tmp_path: Path) -> None:
    found = run(rounds, tmp_path)["measured"]
    roofline = found["roofline"]
    model = shapes.random_model(shapes.config_of("tiny"), torch.device("cpu"), torch.bfloat16)
    read = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert roofline["read_weight_bytes"] == 2 * read
    single = found["target, auto"]["1"]
    share = found["T_p over weight bytes / copy bandwidth, auto"]
    assert share == pytest.approx(single * roofline["copy_bandwidth"] / (2 * read))
    for head in ("packed", "dense"):
        assert found[f"head {head}"]["ratios"]["2"].keys() == {"T_q / T_p", "T_V / T_p"}
        assert 0 < found[f"head {head}"]["sampling"]["share"] < 1


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("default", {"none", "generate"}),
        pytest.param("batched", {"none", "generate_batch"}, marks=pytest.mark.slow),
        pytest.param("static", {"none", "generate, static cache, compiled"}, marks=pytest.mark.slow),
        ("runners", {"none", "none, eager"}),
    ],
)
def test_decode(tmp_path: Path, group: str, names: set[str]) -> None:
    found = run(decode, tmp_path, "--group", group)
    assert found["part"] == f"decode_{group}"
    methods = found["measured"][f"{group}, B 2"]
    assert set(methods) == names
    assert all(method["calls"] == 1 and method["seconds_per_token"] > 0 for method in methods.values())
    assert methods["none"]["facts"]["target_forwards"] == 1 + 8  # the prompt but its last token, then a round each
    if group == "runners":  # same engine, same noise, float by float
        assert methods["none, eager"]["identical_rows"] == [2, 2]


@pytest.mark.slow
def test_speculation(tmp_path: Path) -> None:
    found = run(speculation, tmp_path)["measured"]
    assert found["identity, float32"]["self, always"]["identical_rows"] == [2, 2]
    assert found["policy"]["chosen"]["noise_in_grid_steps"] == speculation.NOISES[0]
    always = found["self, always, B 1"]
    assert always["self, always"]["facts"]["speculative_rounds"] > 0
    assert always["self, always"]["facts"]["block_efficiency"] > 2
    assert always["speedup"] == pytest.approx(always["none"]["mean_seconds"] / always["self, always"]["mean_seconds"])
    assert "self, roofline, B 2" in found


@pytest.mark.slow
def test_grpo(tmp_path: Path) -> None:
    found = run(grpo, tmp_path)
    assert found["skipped"] == {"TRL, continuous batching": "needs a GPU"}
    assert {"TRL", "none", "self", "profile", "lesson"} < found["measured"].keys()
    trl, ours = found["measured"]["TRL"], found["measured"]["self"]
    ratios = found["measured"]["ratios"]
    assert ratios["TRL: rollout"] == trl["rollout_seconds"] / ours["rollout_seconds"]
    assert {"none: rollout", "self, memory given back: step"} < ratios.keys()


def test_profiling(tmp_path: Path) -> None:
    found = run(profiling, tmp_path)["measured"]
    assert {"B 1", "B 2", "B 1, with drafts"} == found["eager"].keys()
    assert found["eager"]["B 1"]["busy_seconds"] == 0  # no GPU, no kernels


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
    for folder, ratio in (("one", 2.0), ("two", 4.0), ("three", None)):
        (tmp_path / folder).mkdir()
        found = decoded(ratio or 0.0) | ({"measured": {}} if ratio is None else {})
        (tmp_path / folder / "decode_default.json").write_text(json.dumps(found))
    folders = [str(tmp_path / folder) for folder in ("one", "two", "three")]
    assert summary.main([*folders, "--quiet"]) == 0
    written = json.loads((tmp_path / "three" / summary.SUMMARY).read_text())
    assert written["figures"][0]["measured"] == 4.0


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
