"""What importing the package and asking the command for help bring along, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import spec_trl


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
