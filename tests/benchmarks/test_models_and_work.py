"""What is measured: synthetic models must be what results say they are, and prompts must be counted right."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import models
from benchmarks.models import LoadedModel, build, measure_agreement, shape_config
from benchmarks.training import question_task
from benchmarks.workload import STORY_MODEL, Workload, prompt_source


def test_without_noise_the_quantized_copy_is_exact_and_more_noise_means_less_overlap() -> None:
    def tiny(noise: float) -> PreTrainedModel:
        return build(shape_config("tiny"), noise, seed=0, dtype=torch.bfloat16, device="cpu")

    exact = tiny(0.0)
    copied = models.quantized_copy(exact).state_dict()
    assert all(torch.equal(original, copied[name]) for name, original in exact.state_dict().items())
    overlaps = [measure_agreement(tiny(noise), 0, 8, 16).overlap_packed_head for noise in (0.0, 0.1, 0.4)]
    assert overlaps[0] == pytest.approx(1.0, abs=1e-5)
    assert overlaps[0] > overlaps[1] + 0.03 > overlaps[2] + 0.06


def test_padding_is_on_the_left_and_does_not_count() -> None:
    inputs = Workload([[5, 6, 7], [8]], 4, 1.0, (), pad_token_id=2).padded(torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [2, 2, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    work = Workload([[1]], 8, 1.0, (3, 9), pad_token_id=3)
    assert work.trimmed([4, 9, 3, 3]) == [4, 9]  # the end of sequence counts
    assert work.trimmed([4, 5]) == [4, 5]
    assert Workload([[1]], 8, 1.0, (), pad_token_id=0).trimmed([4, 0, 0]) == [4, 0, 0]


def test_questions_reward_right_answers(shape: PreTrainedModel, story_tokenizer, tmp_path: Path) -> None:
    path, rows = tmp_path / "gsm8k.jsonl", [{"question": f"{n} apples?", "answer": f"#### {n}"} for n in (1, 8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="--chat: the tokenizer of x has no chat template"):
        prompt_source(LoadedModel(shape, story_tokenizer, {"model": "x"}), path, 3, seed=0, chat=True)
    task = question_task(str(STORY_MODEL), torch.float32, 8, 1, path)
    assert task.dataset["answer"][:] == ["#### 1"] and "1 apples?" in task.dataset["prompt"][0]
    assert task.reward(completions=["It is 1.", "It is 7."], answer=["#### 1"] * 2) == [1.0, 0.0]
