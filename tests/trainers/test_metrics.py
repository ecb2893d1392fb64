"""The rollout/* metrics: all there, each what its name says, in training and in evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.demo.task import build_tokenizer
from tests.trainers.harness import make_trainer, tiny_dataset, tiny_policy, train


ALWAYS = {"seconds", "tokens_per_second", "target_entropy", "tail_seconds", "tail_rounds"}
DRAFTED = ALWAYS | {
    "block_efficiency", "acceptance_rate", "first_token_acceptance", "draft_length", "sd_on_fraction",
    "drafter_refresh_seconds", "block_efficiency_from_0",
}  # fmt: skip


def rollout_names(logs: list[dict[str, float]], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for entry in logs for name in entry if name.startswith(prefix)}


def test_every_metric_is_logged_and_sane(tmp_path: Path) -> None:
    run = train(tmp_path, max_steps=4, draft_lengths=[3])
    assert rollout_names(run.logs, "rollout/") == DRAFTED
    logs = [
        {name.removeprefix("rollout/"): value for name, value in entry.items() if name.startswith("rollout/")}
        for entry in run.logs
        if "rollout/seconds" in entry
    ]
    assert len(logs) == 4
    for entry, completions in zip(logs, run.completions, strict=True):
        assert 0 <= entry["tail_seconds"] < entry["seconds"] and 0 <= entry["tail_rounds"] < 16
        assert entry["tokens_per_second"] * entry["seconds"] == pytest.approx(sum(map(len, completions)))
        assert 1 < entry["block_efficiency"] <= 4  # γ + 1
        assert 0 < entry["acceptance_rate"] < 1
        assert 0 < entry["first_token_acceptance"] < 1
        assert 2 < entry["draft_length"] <= 3  # shorter where a row has little room left
        assert 0.5 < entry["sd_on_fraction"] <= 1
        assert 0 <= entry["drafter_refresh_seconds"] < entry["seconds"]
        assert entry["block_efficiency_from_0"] == entry["block_efficiency"]  # one depth bin holds all of 16 tokens


def test_depth_bins(tmp_path: Path) -> None:
    run = train(tmp_path, max_steps=1, max_completion_length=80, per_device_train_batch_size=4)
    shallow, deep = (run.metric(f"rollout/block_efficiency_from_{edge}")[0] for edge in (0, 64))
    assert min(shallow, deep) <= run.metric("rollout/block_efficiency")[0] <= max(shallow, deep)


def test_without_a_drafter(tmp_path: Path) -> None:
    assert rollout_names(train(tmp_path, "none").logs, "rollout/") == ALWAYS


def test_prompt_lookup(tmp_path: Path) -> None:
    assert rollout_names(train(tmp_path, "ngram").logs, "rollout/") == DRAFTED - {"drafter_refresh_seconds"}


def test_evaluation_has_its_own(tmp_path: Path) -> None:
    trainer, run = make_trainer(
        tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
        trainer={"eval_dataset": tiny_dataset(2)},
    )  # fmt: skip
    trainer.train()
    assert rollout_names(run.logs, "eval_rollout/") == DRAFTED
    assert rollout_names(run.logs, "rollout/") == DRAFTED
    (entry,) = [entry for entry in run.logs if "eval_rollout/seconds" in entry]
    assert not any(name.startswith("rollout/") for name in entry)


def test_one_token_leaves_nothing_to_draft(tmp_path: Path) -> None:
    run = train(tmp_path, max_completion_length=1)
    assert run.metric("rollout/sd_on_fraction") == [0.0] * 3
    assert run.metric("rollout/draft_length") == [0.0] * 3
    assert run.metric("rollout/block_efficiency") == []  # nothing to report, and no NaN in TRL's averages
    assert all(run.metric("rollout/target_entropy"))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_target_entropy_is_the_surprise_of_what_was_sampled(tmp_path: Path, temperature: float) -> None:
    texts: list[tuple[str, list[int]]] = []

    def remember(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        texts.extend(zip(prompts, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    trainer, run = make_trainer(
        tmp_path, max_steps=1, temperature=temperature, trainer={"reward_funcs": remember}
    )  # fmt: skip
    trainer.train()
    policy, tokenizer = tiny_policy(), build_tokenizer()
    logprobs = []
    for prompt, completion in texts:
        ids = torch.tensor([*tokenizer(prompt).input_ids, *completion])
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, -len(completion) - 1 : -1]  # [new, V]
        logprobs.append((logits / temperature).log_softmax(-1).gather(1, ids[-len(completion) :, None]))
    assert run.metric("rollout/target_entropy")[0] == pytest.approx(-torch.cat(logprobs).mean().item(), rel=1e-5)
