"""``spec-trl calibrate``: what it loads, what it asks for, and the files it writes, on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spec_trl.cli.main import main
from spec_trl.papers.efficient_rollout.commands import calibrate
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.sweep import read_sweep
from tests.cli.sample_run import make_profile
from tests.conftest import tiny_llama


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PreTrainedModel, Any, dict[str, Any]]]:
    """Calls of `calibrate`, answered at once with a profile from elsewhere."""
    calls = []

    def answer(model: PreTrainedModel, config: Any, *sizes: int, **options: Any) -> Profile:
        calls.append((model, config, {"sizes": sizes, **options}))
        return make_profile()

    monkeypatch.setattr(calibrate, "calibrate", answer)
    return calls


def test_options_reach_the_sweep_and_files_are_written(tmp_path: Path, asked: list[Any]) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    output, sweep = tmp_path / "profile.json", tmp_path / "sweep.csv"
    arguments = ["--dtype", "float32", "--quantization", "rtn-w8", "--kernel", "reference", "--lm-head", "dense"]
    arguments += ["--max-batch-size", "8", "--max-length", "128", "--budget", "7", "--device", "cpu"]
    arguments += ["-o", str(output), "--csv", str(sweep)]
    assert main(["calibrate", str(tmp_path / "model"), *arguments]) == 0
    model, config, options = asked[0]
    assert model.dtype == torch.float32 and not model.training
    assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight.float())
    assert (config.draft_quantization, config.draft_kernel) == ("rtn-w8", "reference")
    assert config.efficient_rollout.lm_head == "dense"
    assert options == {"sizes": (8, 128), "budget_seconds": 7.0, "progress": True}
    assert Profile.load(output) == make_profile()
    assert read_sweep(sweep) == make_profile().samples


def test_a_config_is_enough(tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama().config.save_pretrained(tmp_path / "bare")
    tiny_llama().save_pretrained(tmp_path / "whole")
    for arguments in (["bare"], ["bare/config.json"], ["whole", "--random-weights"]):
        path = str(tmp_path / arguments[0])
        assert main(["calibrate", path, *arguments[1:], "-o", str(tmp_path / "profile.json")]) == 0
        said = "holds no weights: random ones are measured" in capsys.readouterr().out
        assert said == (arguments[0] != "whole")
        model = asked[-1][0]
        assert model.dtype == torch.bfloat16 and model.config.vocab_size == 64
        assert not torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight.bfloat16())


@pytest.mark.slow
def test_a_real_sweep_of_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama(max_position_embeddings=128).config.save_pretrained(tmp_path)
    output, sweep = tmp_path / "profile.json", tmp_path / "sweep.csv"
    arguments = ["--max-batch-size", "32", "--max-length", "128", "--budget", "1", "-o", str(output)]
    assert main(["calibrate", str(tmp_path), *arguments, "--csv", str(sweep)]) == 0
    assert "written: " in capsys.readouterr().out
    profile = Profile.load(output)
    batches = {sample.batch for sample in profile.samples}
    assert (min(batches), max(batches)) == (1, 32)  # more rows than a CPU's packed kernel serves
    assert read_sweep(sweep) == profile.samples
    assert main(["validate", str(output)]) == 0
    assert main(["predict", str(output), "--batch", "1,4", "--length", "64", "--acceptance", "0.8"]) == 0
    assert main(["plot", str(output), "-o", str(tmp_path / "boundary.png")]) == 0
