"""Each benchmark once with `--tiny`: it runs, and writes a result with findings. No time is looked at."""

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import quarter
from benchmarks.measure import read_result
from tests.conftest import TRANSFORMERS


ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
NO_RESULT = {  # what is not run here
    "between_commits": "takes a git checkout, and compiles in two processes",
    "results_page": "test_results runs it",
    "paper.published": "converts files; paper/test_published runs it",
    **({"states": "such families are refused"} if TRANSFORMERS < (5, 21) else {}),
}
NAMES = sorted(
    ".".join(path.relative_to(BENCHMARKS).with_suffix("").parts)
    for path in BENCHMARKS.rglob("*.py")
    if 'if __name__ == "__main__"' in path.read_text() and path.parent.name != "gpu"
)
UNTIMED = {"control_constants", "control_regret", "identity", "identity_grid", "kv_memory"}
UNTIMED |= {"paper.specactor", "sampler_mismatch"}
"""Those whose findings no clock decides."""
LONG = ("paper.specactor",)  # whole clusters; tests/specactor simulates smaller ones
GPU = {
    "headline": {"tiny, B 2", "tiny, bytes", "tiny, captured against eager"},
    "smoke": {"exact, self", "images", "mtp", "mtp, hybrid", "eagle3", "dflash", "LoRA"},
    "grpo": {"lesson", "ours", "TRL", "TRL, over ours"},
    **dict.fromkeys(("small", "batched", "static"), {"tiny, B 2"}),
    "exact": {"tiny, exact=True, B 2"},
}
QUICK = ("headline",)


TOKENS_ARE_THE_SAME: dict[str, Callable[[Any], bool]] = {
    "control_machine": lambda found: all(
        cell["identical_rows"] == cell["rows"] > 0 for model in found["models"] for cell in model["cells"]
    ),
    "end_to_end": lambda found: all(
        own["identical_steps"] == own["steps"] == 2 for name, own in found["methods"].items() if name != "trl"
    ),
    "identity": lambda found: all(
        own["unexplained"] == own["near_ties"] == 0 and own["tokens_compared"] >= 100
        for study in found["studies"] for own in study["strategies"].values()
    ),
    "identity_grid": lambda found: all(cell["identical"] == cell["rows"] > 0 for cell in found["cells"].values()),
    "rollout": lambda found: all(
        own["identical_rows"] in (None, own["rows"]) for each in found["batches"].values() for own in each
    ),
    "tts": lambda found: 0 < found["identity"]["tokens"] == found["identity"]["same"] and found["target_unchanged"],
}  # fmt: skip
"""In float64, by what a result says of it."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NAMES if name not in NO_RESULT],
)
def test_a_benchmark_runs_on_the_smallest_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    import_module(f"benchmarks.{name}").main(["--tiny", "--threads", "1"])
    (output,) = (tmp_path / "bench_output").rglob("*.json")
    text = output.read_text()
    assert str(tmp_path) not in text and str(ROOT) not in text
    result = read_result(output)
    assert result.findings and all(each.what for each in result.findings)
    assert (result.repeats is None) == (name in UNTIMED) and result.machine["cpu_capability"]
    assert re.search(r"\d", capsys.readouterr().out)
    assert name not in TOKENS_ARE_THE_SAME or TOKENS_ARE_THE_SAME[name](result.details)


@pytest.mark.parametrize(
    "stage", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in GPU if each not in QUICK)]
)
def test_a_stage_of_the_gpu_benchmark_runs_on_the_tiny_shape(stage: str, tmp_path: Path) -> None:
    assert quarter.main([stage, "--tiny", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / f"{stage}.json").read_text())
    assert GPU[stage] <= result["measured"].keys() and not result["errors"] and not result["skipped"]
    assert result["machine"]["accelerator"] is None
    if stage == "headline":
        found = result["measured"]["tiny, B 1"]
        assert found["self"]["facts"]["block_efficiency"] > 5  # its weights lie on the grid of 4 bits
        assert all(found[step] > 0 for step in ("T_p, ms", "T_q, ms", "T_V, ms"))
        assert 0 < result["measured"]["tiny, bytes"]["read by a draft step, GB"] < 0.0007


def test_each_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    for name in [*(name for name in NAMES if name != "results_page"), "gpu.quarter"]:
        with pytest.raises(SystemExit) as ended:
            import_module(f"benchmarks.{name}").main(["--help"])
        assert ended.value.code == 0 and "--output" in capsys.readouterr().out, name
