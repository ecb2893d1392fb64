"""What a policy may come in: adapters, torch.compile, a vision-language model that is given text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

from trl import GRPOTrainer

from spec_trl.generation.shadow import uncompiled
from tests.trainers.harness import assert_same_training, make_trainer, tiny_policy, train


# ---- Adapters --------------------------------------------------------------------------------------------------

SOFT_PROMPTS = [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig]


@pytest.mark.parametrize("kind", SOFT_PROMPTS)
@pytest.mark.parametrize("strategy", ["none", "self"])
def test_soft_prompts_are_refused_at_construction(tmp_path: Path, kind: type, strategy: str) -> None:
    adapter = kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for options in ({"trainer": {"peft_config": adapter}}, {"policy": get_peft_model(tiny_policy(), adapter)}):
        with pytest.raises(ValueError, match="prompt learning .*Use LoRA"):
            make_trainer(tmp_path, strategy, **options)


@pytest.mark.parametrize("strategy", ["none", "self"])
def test_activated_lora_is_refused_at_construction(tmp_path: Path, strategy: str) -> None:
    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
    with pytest.raises(ValueError, match="aLoRA.*Use LoRA"):
        make_trainer(tmp_path, strategy, trainer={"peft_config": adapter})


# ---- torch.compile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [None, LoraConfig(target_modules=["q_proj"])], ids=["whole", "LoRA"])
def test_a_compiled_policy_is_drafted_for(
    tmp_path: Path, adapter: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_compiled = []

    def loss(trainer: Any, model: Any, inputs: Any, **_: Any) -> Any:
        is_compiled.append(model is not uncompiled(model))
        return sum(parameter.sum() for parameter in model.parameters())  # a forward would be traced for seconds

    monkeypatch.setattr(GRPOTrainer, "compute_loss", loss)
    compiled = dict(torch_compile=True, torch_compile_backend="eager")
    options: dict[str, Any] = dict(max_steps=2, trainer={"peft_config": adapter})
    run = train(tmp_path, **options, **compiled)
    assert all(is_compiled)
    assert_same_training(run, train(tmp_path, "none", **options))
    assert min(run.metric("rollout/acceptance_rate")) > 0
