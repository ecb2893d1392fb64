"""What a policy may come in: adapters, torch.compile, a vision-language model that is given text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast, ProcessorMixin
from trl import GRPOTrainer

from examples.demo.task import build_tokenizer
from spec_trl import SpecGRPOTrainer
from spec_trl.generation.engine.shadow import uncompiled
from tests.trainers.harness import PROMPTS, Run, assert_same_training, make_trainer, tiny_policy, train


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


# ---- A vision-language model that is given text ----------------------------------------------------------------


class Processor(ProcessorMixin):
    """Tokenizes text, and marks each token with `mark` in a field called `field`, as processors of images do."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, field: str = "token_type_ids", mark: int = 0) -> None:
        super().__init__(tokenizer)
        self.field, self.mark = field, mark

    def apply_chat_template(self, conversation: list[Any], **_: Any) -> dict[str, Any]:
        ids = [self.tokenizer(messages[-1]["content"][0]["text"])["input_ids"] for messages in conversation]
        return {"input_ids": ids, self.field: [[self.mark] * len(row) for row in ids]}


def train_on_text(
    output_dir: Path, strategy: str = "self", processor: dict[str, Any] | None = None, **options: Any
) -> Run:
    """Trains a tiny Gemma 3 with a vision tower on conversations without images."""
    torch.manual_seed(0)
    text = dict(
        vocab_size=48, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.05, sliding_window=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, intermediate_size=32)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=45,
        eoi_token_index=46,
        image_token_index=47,
    )
    conversations = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    return train(
        output_dir, strategy, policy=Gemma3ForConditionalGeneration(config).double(), max_steps=2,
        tokenizer=Processor(build_tokenizer(), **(processor or {})),
        trainer={"train_dataset": Dataset.from_list(conversations)}, **options,
    )  # fmt: skip


def test_text_for_a_vision_language_model(tmp_path: Path) -> None:
    none = train_on_text(tmp_path / "none", "none")
    drafted = train_on_text(tmp_path / "self", "self", {"field": "mm_token_type_ids"})
    assert_same_training(drafted, none)
    assert min(drafted.metric("rollout/acceptance_rate")) > 0 and len({str(ids) for ids in none.completions[0]}) > 4


def test_text_for_a_vision_language_model_as_in_trl(tmp_path: Path) -> None:
    ours, theirs = (
        train_on_text(tmp_path / kind.__name__, "none", kind=kind, top_k=1) for kind in (SpecGRPOTrainer, GRPOTrainer)
    )
    assert ours.completions == theirs.completions and ours.losses == theirs.losses


@pytest.mark.parametrize("field", ["token_type_ids", "pixel_values"])
def test_images_are_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ValueError, match=f"the prompts carry .'{field}'.*Use trl.GRPOTrainer"):
        train_on_text(tmp_path, processor={"field": field, "mark": 1})
