"""GRPO on prompts with images: completions, losses and weights are those without drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

import spec_trl
from examples.demo.task import build_tokenizer
from spec_trl.trainers.prompt_media import media_inputs
from spec_trl.trainers.trainers import SpecGRPOConfig
from tests import tiny_families
from tests.tiny_vision import VISION, make, processor
from tests.trainers.harness import OTHERS, Run, assert_same_training, make_run, tiny_policy
from tests.trainers.trl_trainers import count_digits


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16 + 8 * (seed % 2), 3))
    return Image.fromarray(pixels.astype(np.uint8))


def task(images: tuple[int, ...] = (1, 2), first: int = 0) -> Dataset:
    """Prompts with so many images in turn, from picture `first` on; some have equal words."""
    rows = []
    for row in range(8):
        prompt = [{"role": "user", "content": ["a 3 +", "c 5", "f 2 + g 2 + 1"][row % 3]}]
        pictures = range(first + 3 * row, first + 3 * row + images[row % len(images)])
        rows.append({"prompt": prompt, "images": [picture(seed) for seed in pictures]})
    return Dataset.from_list(rows)


def run(folder: Path, family: str, strategy: str, dataset: Dataset | None = None, **options: Any) -> Run:
    return make_run(
        folder / strategy, strategy, policy=make(family), tokenizer=processor(family), max_completion_length=12,
        trainer={"train_dataset": task() if dataset is None else dataset}, **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "idefics3"])
def test_training(family: str, tmp_path: Path) -> None:
    none, drafted = run(tmp_path, family, "none").train(), run(tmp_path, family, "self").train()
    assert_same_training(drafted, none)
    assert len(none.completions) == 3 and len({str(ids) for rows in none.completions for ids in rows}) > 12
    assert min(drafted.metric("rollout/acceptance_rate")) > 0.05
    apart = drafted.metric("sampling/sampling_logp_difference/mean")
    assert len(apart) == 3 and 0 < max(apart) < 1  # what the tokens of images would have got, which are not written
    assert apart == none.metric("sampling/sampling_logp_difference/mean")
    other = run(tmp_path, family, "none", task(first=100), max_steps=1).train()
    assert other.completions[0] != none.completions[0], "images matter"


def test_other_trainers_and_rows_without_images(tmp_path: Path) -> None:
    """Every batch has a prompt with an image, and one without."""
    options: dict[str, Any] = OTHERS["rloo"] | {"max_steps": 2, "shuffle_dataset": False}
    none, drafted = (run(tmp_path, "qwen2_5_vl", name, task((1, 0)), **options).train() for name in ("none", "self"))
    assert_same_training(drafted, none)
    assert min(drafted.metric("rollout/acceptance_rate")) > 0.05 and len(none.completions) == 2


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_speculate(family: str, tmp_path: Path) -> None:
    """TRL's own trainer: the calls of `generate` that it makes draft."""

    def trained(strategy: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        args = GRPOConfig(
            output_dir=str(tmp_path / strategy), max_steps=2, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=12, learning_rate=3e-3, use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True, logging_steps=1, save_strategy="no", seed=3, report_to="none",
        )  # fmt: skip
        trainer = GRPOTrainer(
            make(family), count_digits, args=args, train_dataset=task(), processing_class=processor(family)
        )
        with spec_trl.speculate(trainer, strategy, sd_toggle="always", draft_length=3):
            trainer.train()
        return [log for log in trainer.state.log_history if "loss" in log], trainer.model.state_dict()

    (logs, weights), (drafted, drafted_weights) = trained("none"), trained("self")
    for name in ("loss", "reward", "completions/mean_length"):
        assert [log[name] for log in logs] == [log[name] for log in drafted]
    assert all(torch.equal(weight, drafted_weights[name]) for name, weight in weights.items())
    assert len(drafted) == 2 and min(log["rollout/acceptance_rate"] for log in drafted) > 0.3


@pytest.mark.parametrize(
    ("message", "fields", "given"),
    [
        ("carry images, and the processor gives no pixel_values.*or use trl.GRPOTrainer", {}, {}),
        ("carry mm_token_type_ids, and", {"mm_token_type_ids": [[0, 1]]}, {"images": None}),
        ("carry input_features, and", {"input_features": [[0.0]]}, {"images": None}),
        ("does not go with tools", {"pixel_values": [1.0]}, {"has_tools": True}),
    ],
)
def test_refusals(message: str, fields: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    options = SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given.pop("config", {}))
    arguments = {"images": [[picture(0)]], "has_tools": False} | given
    with pytest.raises(ValueError, match=message):
        media_inputs(fields=fields, policy=make("gemma3"), options=options, **arguments)


WITHOUT = task((0,))


@pytest.mark.parametrize(
    ("message", "family", "options"),
    [
        ("images of model type 'llava' are not served; .* Use trl.GRPOTrainer, or leave the images out", "llava", {}),
        ("images of model type 'llama' are not served", "", {}),
        (r"prompts with images does not go with the processing_class, a \w+:", "gemma3", {"tokenizer": True}),
    ],
)
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_refused_before_any_work(
    name: str, message: str, family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row with the image is one of few."""
    monkeypatch.setattr(PreTrainedModel, "__call__", lambda *_, **__: pytest.fail("a forward ran"))
    policy = tiny_policy() if not family else make(family) if family in VISION else tiny_families.make(family)
    options = dict(options)
    tokenizer = build_tokenizer() if options.pop("tokenizer", False) or not family else processor("qwen2_5_vl")
    data = {"train_dataset": WITHOUT} | {name: {"a": task((0, 0, 1))} if name[0] == "e" else task((0, 0, 1))}
    with pytest.raises(ValueError, match=message):
        make_run(tmp_path, policy=policy, tokenizer=tokenizer, trainer=data, **options)
