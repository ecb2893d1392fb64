"""A `rollout_func` that samples with the trainer's engine drafts, in any number of turns."""

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

import spec_trl
from examples.demo.task import build_tokenizer
from tests.trainers.harness import Run, assert_same_training, tiny_dataset, tiny_policy, train


def two_turns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A turn, the environment's answer, and another turn; of the answer nothing is trained."""
    backend = spec_trl.rollout_backend(trainer)
    first = backend.generate(backend.tokenize(prompts))
    answer = [5, 6]
    later = backend.generate(
        [prompt + text + answer for prompt, text in zip(first["prompt_ids"], first["completion_ids"], strict=True)]
    )
    turns = list(zip(first["completion_ids"], later["completion_ids"], strict=True))
    logprobs = zip(first["logprobs"], later["logprobs"], strict=True)
    return {
        "prompt_ids": first["prompt_ids"],
        "completion_ids": [one + answer + other for one, other in turns],
        "logprobs": [one + [0.0, 0.0] + other for one, other in logprobs],
        "env_mask": [[1] * len(one) + [0, 0] + [1] * len(other) for one, other in turns],
    }


def run(folder: Path, strategy: str) -> Run:
    options: dict[str, Any] = {"max_completion_length": 16, "max_steps": 3}
    return train(folder, strategy, policy=tiny_policy().float(), trainer={"rollout_func": two_turns}, **options)


@pytest.mark.filterwarnings("ignore:.*experimental")
def test_an_agents_loop_drafts(tmp_path: Path) -> None:
    plain, drafted = run(tmp_path / "none", "none"), run(tmp_path / "self", "self")
    assert_same_training(plain, drafted)
    rates = drafted.metric("rollout/acceptance_rate")
    assert len(rates) == 3 and min(rates) > 0.2
    (record, *_) = drafted.log.of("train")
    assert record.requests == 2 * len(drafted.completions[0]), "two turns of a row are two requests of one rollout"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trainer is a object; give a SpecGRPOTrainer"):
        spec_trl.rollout_backend(object())
    theirs = GRPOTrainer(
        tiny_policy().float(), lambda completions, **_: [0.0] * len(completions), train_dataset=tiny_dataset(8),
        args=GRPOConfig(tmp_path, use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=8),
        processing_class=build_tokenizer(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="trainer is a GRPOTrainer; give a SpecGRPOTrainer"):
        spec_trl.rollout_backend(theirs)
