"""QLoRA on a CPU: a training with our trainer leaves the frozen weights as one with TRL's own does."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from trl import GRPOTrainer

from spec_trl import SpecGRPOTrainer
from spec_trl.generation.engine.network.foreign_layers import alike, is_foreign, stored
from tests.quantization.test_bitsandbytes import to_bitsandbytes
from tests.trainers.harness import Run, make_run, tiny_policy


pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def trained(folder: Path, kind: Any, bits: int, dtype: torch.dtype, **options: Any) -> tuple[list[Any], Tensor, Run]:
    """What the frozen layers store after a training, the policy's logits in train mode, and the run."""
    policy = to_bitsandbytes(tiny_policy(hidden_size=128).float(), bits, dtype)
    adapter = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "up_proj"])}
    sizes = dict(max_completion_length=8, per_device_train_batch_size=4)  # as many rows as int8 drafts serve
    run = make_run(folder, policy=policy, kind=kind, trainer=adapter, **sizes, **options)
    run.trainer.train()
    model = run.trainer.model
    frozen = [value for module in model.modules() if is_foreign(module) for value in stored(module)]
    assert frozen and model.training
    with torch.no_grad():
        return frozen, model(input_ids=torch.arange(8)[None] + 3).logits, run


@pytest.mark.filterwarnings("ignore:args is a SpecGRPOConfig")
@pytest.mark.parametrize(
    ("bits", "dtype"), [(4, torch.float32), (4, torch.bfloat16), (8, torch.float32)], ids=["nf4", "bfloat16", "int8"]
)
def test_frozen_weights_and_forward_are_those_of_a_run_of_trl(
    bits: int, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    expected, logits, _ = trained(tmp_path, GRPOTrainer, bits, dtype, max_steps=1, learning_rate=0.0)
    for steps, rate in ((1, 0.0), (10, 1e-2)):
        found, policy_logits, run = trained(
            tmp_path, SpecGRPOTrainer, bits, dtype, max_steps=steps, learning_rate=rate
        )
        assert alike(found, expected)
        assert torch.equal(policy_logits, logits) is (rate == 0)
        accepted = run.metric("rollout/acceptance_rate")
        assert len(accepted) == steps and min(accepted) > 0
