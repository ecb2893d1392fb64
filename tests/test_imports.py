"""What importing the package and asking the command for help bring along, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import spec_trl
from tests.cli.sample_run import make_profile


ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    """Runs `code` in a new interpreter; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_package_brings_nothing_that_a_model_has_not_brought() -> None:
    # transformers itself imports scipy and Triton where they are installed; generating must not import more.
    printed = run("""
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
before = set(sys.modules)
import spec_trl
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, assistant_strategy="self")
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new & {"bitsandbytes", "datasets", "matplotlib", "pandas", "peft", "scipy", "triton", "trl"}))
print(*sorted({"SpecGRPOConfig", "SpecGRPOTrainer"} & set(dir(spec_trl))))
""")
    assert printed.splitlines() == ["", "SpecGRPOConfig SpecGRPOTrainer"]


def test_unknown_names_are_missing_as_anywhere() -> None:
    assert not hasattr(spec_trl, "SpecGRPO")


def test_the_command_reads_arguments_before_torch_is_imported(tmp_path: Path) -> None:
    make_profile().save(tmp_path / "profile.json")
    printed = run(f"""
import sys
import spec_trl_command
for arguments in (["--help"], ["bench", "--help"], ["calibrate", "model", "--dtype", "bf16"]):
    sys.argv = ["spec-trl", *arguments]
    try:
        spec_trl_command.main()
    except SystemExit:
        print("torch" in sys.modules, "matplotlib" in sys.modules)
sys.argv = ["spec-trl", "predict", {str(tmp_path / "profile.json")!r}, "--acceptance", "0.9"]
print(spec_trl_command.main(), "torch" in sys.modules)
""").splitlines()
    assert [line for line in printed if line.endswith(("True", "False"))] == ["False False"] * 3 + ["0 False"]
