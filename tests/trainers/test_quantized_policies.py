"""QLoRA on a CPU: a training with our trainer leaves the frozen weights as one with TRL's own does."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from examples.demo.task import build_tokenizer
from spec_trl import SpecGRPOConfig, SpecGRPOTrainer
from spec_trl.generation.engine.network.foreign_layers import alike, is_foreign, stored
from tests.quantization.test_bitsandbytes import to_bitsandbytes
from tests.trainers.harness import tiny_dataset, tiny_policy


pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def train(folder: Path, ours: bool, bits: int, dtype: torch.dtype, **options: Any) -> tuple[list[Any], Tensor, Any]:
    """What the frozen layers store afterwards, the policy's logits in train mode, and the trainer."""
    policy = to_bitsandbytes(tiny_policy(hidden_size=128).float(), bits, dtype)
    settings = dict(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=4,
        num_generations=4, max_completion_length=8, save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    kind, config = (SpecGRPOTrainer, SpecGRPOConfig) if ours else (GRPOTrainer, GRPOConfig)
    trainer = kind(
        policy, lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        args=config(**(settings | options)), train_dataset=tiny_dataset(8), processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj"]),
    )  # fmt: skip
    trainer.train()
    frozen = [value for module in trainer.model.modules() if is_foreign(module) for value in stored(module)]
    assert frozen and trainer.model.training
    with torch.no_grad():
        return frozen, trainer.model(input_ids=torch.arange(8)[None] + 3).logits, trainer


@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.float32), (4, torch.bfloat16), (8, torch.float32)], ids=["nf4", "bfloat16", "int8"]
)
def test_frozen_weights_and_forward_are_those_of_a_run_of_trl(
    bits: int, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    expected, logits, _ = train(tmp_path, False, bits, dtype, max_steps=1, learning_rate=0.0)
    for steps, rate in ((1, 0.0), (10, 1e-2)):
        options = dict(max_steps=steps, learning_rate=rate, assistant_strategy="self")
        options["speculative_config"] = {"sd_toggle": "always"}
        found, policy_logits, trainer = train(tmp_path, True, bits, dtype, **options)
        assert alike(found, expected)
        assert torch.equal(policy_logits, logits) is (rate == 0)
        accepted = [entry["rollout/acceptance_rate"] for entry in trainer.state.log_history if "reward" in entry]
        assert len(accepted) == steps and min(accepted) > 0
