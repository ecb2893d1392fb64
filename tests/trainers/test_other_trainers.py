"""Trainers that know nothing of spec_trl and call `generate`: they draft with one line in `generation_kwargs`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import RLOOConfig, RLOOTrainer

import spec_trl
from examples.demo.task import build_tokenizer
from spec_trl.generation.engine.rollout import Rollout
from tests.trainers.harness import tiny_dataset, tiny_policy


def test_rloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions, weights and saved arguments."""
    drafted: list[int] = []
    run = Rollout.run

    def watched(rollout: Rollout) -> Any:
        completions, statistics = run(rollout)
        drafted.append(statistics.total.drafted)
        return completions, statistics

    monkeypatch.setattr(Rollout, "run", watched)

    def train(strategy: str) -> tuple[list[Any], list[torch.Tensor]]:
        seen: list[Any] = []

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            seen.append(completion_ids)
            return [float(len(set(ids))) for ids in completion_ids]

        options = {"seed": 5, "sd_toggle": "always", "draft_kernel": "reference"}
        given = {"assistant_strategy": strategy, "speculative_config": options}
        config = RLOOConfig(
            output_dir=str(tmp_path), generation_kwargs=given, beta=0.0,
            max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=8, report_to="none",
            save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=3, learning_rate=1e-2,
        )  # fmt: skip
        config.to_json_string()
        policy = tiny_policy()
        trainer = RLOOTrainer(policy, reward, config, tiny_dataset(8), processing_class=build_tokenizer())
        trainer.train()
        spec_trl.release(policy)
        return seen, [parameter.detach() for parameter in policy.parameters()]

    (plain, weights), (speculative, same) = train("none"), train("self")
    assert plain == speculative and all(map(torch.equal, weights, same))
    assert drafted[:2] == [0, 0] and all(drafted[2:]) and len(drafted) == 4
