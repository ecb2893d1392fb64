"""Fifty steps under `exact_logprobs`: in each the loss has the sampler's bits, and drafts change no weight."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from spec_trl.json_files import read_json
from spec_trl.native.native_code import compiler
from spec_trl.trainers.certificate import CERTIFICATE_FILE, Content
from tests.generation.engine.test_families import build
from tests.generation.test_adapted_experts import EXPERTS
from tests.tiny_vision import make, processor
from tests.trainers.harness import assert_same_training, hybrid_policy, train
from tests.trainers.test_exact_logprobs import tiny_family
from tests.trainers.test_prompt_images import task


pytestmark = [pytest.mark.slow, pytest.mark.skipif(compiler() is None, reason="no C++ compiler")]
STEPS = 50
POLICIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5_text": hybrid_policy,
    "falcon_h1": lambda: tiny_family("falcon_h1"),
    "gptj": lambda: tiny_family("gptj"),
    "qwen3_vl": lambda: make("qwen3_vl"),
    "qwen3_moe": lambda: build("qwen3_moe", vocab_size=48),
}


def options_of(family: str) -> dict[str, Any]:
    """Images for the one, LoRA on the experts of another."""
    if family == "qwen3_vl":
        return {"trainer": {"train_dataset": task()}, "tokenizer": processor(family)}
    if family == "qwen3_moe":
        return {"trainer": {"peft_config": LoraConfig(r=4, **EXPERTS, init_lora_weights=False)}}
    return {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", POLICIES)
def test_each_step_has_the_samplers_bits(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    plain, drafted = (
        train(
            tmp_path / strategy, strategy, policy=POLICIES[family]().to(dtype), exact_logprobs=True, max_steps=STEPS,
            max_completion_length=12, learning_rate=1e-3, **options_of(family),
        )
        for strategy in ("none", "self")
    )  # fmt: skip
    assert_same_training(plain, drafted)
    for strategy in ("none", "self"):
        found = read_json(tmp_path / strategy / CERTIFICATE_FILE, Content, "certificate", "")
        assert [each.distance for each in found.steps] == [0.0] * STEPS and found.not_exact == []
    assert found.accepted > STEPS
    assert any(len({*map(tuple, rows)}) > 1 for rows in drafted.completions) and max(drafted.metric("grad_norm")) > 0
