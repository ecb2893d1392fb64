"""What training samples does not depend on evaluations in between, nor on where a run was interrupted."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.engine.drafter import DraftSession
from tests.trainers.harness import Run, make_trainer, tiny_dataset, train


def test_evaluation_does_not_change_what_training_samples(tmp_path: Path) -> None:
    sgd = dict(max_steps=5, optim="sgd", learning_rate=0.1)  # Adam makes full steps of vanishing gradients' rounding
    evaluation = dict(
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, trainer={"eval_dataset": tiny_dataset(4)}
    )
    plain, evaluated = train(tmp_path, **sgd), train(tmp_path, **sgd, **evaluation)
    assert plain.completions == evaluated.completions
    evaluations = [ids for mode, ids in evaluated.rewarded if mode == "eval"]
    assert len(evaluations) == 10  # two batches each
    # The trainer's own shuffling draws from torch's generator, as the evaluation's loader does: sums differ in order.
    for name, weight in plain.weights.items():
        torch.testing.assert_close(weight, evaluated.weights[name], rtol=1e-5, atol=1e-7)


def test_evaluation_samples_anew_each_time(tmp_path: Path) -> None:
    trainer, run = make_trainer(tmp_path, per_device_eval_batch_size=8)
    trainer.evaluate(tiny_dataset(2))
    trainer.evaluate(tiny_dataset(2))
    (_, first), (_, second) = run.rewarded
    assert first != second


def uninterrupted(tmp_path: Path, **options: Any) -> Run:
    return train(tmp_path / "whole", max_steps=6, **options)


@pytest.mark.parametrize("strategy", ["self", "none"])
def test_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path, strategy: str) -> None:
    whole = uninterrupted(tmp_path, strategy=strategy)
    out = tmp_path / "out"
    first = train(out, strategy, max_steps=3, save_strategy="steps", save_steps=3)
    checkpoint = out / "checkpoint-3"
    assert json.loads((checkpoint / "rollout_state.json").read_text())["rollouts"] == {"train": 3, "eval": 0}
    rest = train(out, strategy, resume=checkpoint, max_steps=6)
    assert whole.completions == first.completions + rest.completions
    assert whole.losses == first.losses + rest.losses
    for name, weight in whole.weights.items():
        assert torch.equal(weight, rest.weights[name]), name


def test_resumed_run_goes_on_with_its_draft_length(tmp_path: Path) -> None:
    climbing = dict(draft_lengths=[1, 2, 3, 4, 5], draft_length_up=1e-3, draft_length_down=1e-4)  # every other rollout
    whole = uninterrupted(tmp_path, **climbing)
    saving = dict(save_strategy="steps", save_steps=3, **climbing)
    first = train(tmp_path / "out", max_steps=3, **saving)
    rest = train(tmp_path / "out", resume=tmp_path / "out" / "checkpoint-3", max_steps=6, **saving)
    lengths = whole.metric("rollout/draft_length")
    assert [math.ceil(length) for length in lengths] == [1, 1, 2, 2, 3, 3]
    assert lengths == first.metric("rollout/draft_length") + rest.metric("rollout/draft_length")
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "rollout_state.json").read_text())
    assert state["draft_lengths"]["self"]["draft_length"] == 2 and len(state["draft_lengths"]["self"]["window"]) == 1


def test_checkpoints_without_draft_lengths_start_at_the_first(tmp_path: Path) -> None:
    saving = dict(save_strategy="steps", save_steps=2)
    train(tmp_path, max_steps=2, **saving)
    (tmp_path / "checkpoint-2" / "rollout_state.json").write_text(json.dumps({"rollouts": {"train": 2, "eval": 0}}))
    rest = train(tmp_path, resume=tmp_path / "checkpoint-2", max_steps=3, **saving)
    assert [math.ceil(length) for length in rest.metric("rollout/draft_length")] == [5]


def test_checkpoint_of_another_strategy_and_ladder(tmp_path: Path) -> None:
    train(tmp_path, "ngram", max_steps=2, save_strategy="steps", save_steps=2)
    rest = train(tmp_path, "self", resume=tmp_path / "checkpoint-2", max_steps=3, draft_lengths=[2, 3])
    assert [math.ceil(length) for length in rest.metric("rollout/draft_length")] == [2]


def test_resumed_run_remembers_its_history(tmp_path: Path) -> None:
    saving = dict(save_strategy="steps", save_steps=3, trainer={"train_dataset": tiny_dataset(2)})
    train(tmp_path, "history", max_steps=3, **saving)
    trainer, _ = make_trainer(tmp_path, "history", max_steps=4, **saving)
    remembered = []
    begin = HistoryDrafter.begin

    def watch(drafter: HistoryDrafter, session: DraftSession) -> None:
        remembered.append(len(drafter.history))
        begin(drafter, session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HistoryDrafter, "begin", watch)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    saved = torch.load(tmp_path / "checkpoint-3" / "rollout_history_0.pt", weights_only=True)
    assert remembered == [len(saved["texts"]) + len(saved["prompts"])] and remembered[0] > 0


def test_run_that_dies_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path)
    saving = dict(max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer, died = make_trainer(tmp_path / "out", **saving)
    count_digits = trainer.reward_funcs[0]

    def die_in_the_sixth_rollout(**kwargs: Any) -> list[float]:
        if len(died.completions) == 5:
            raise ConnectionError("the judge is gone")
        return count_digits(**kwargs)

    trainer.reward_funcs[0] = die_in_the_sixth_rollout
    with pytest.raises(ConnectionError):
        trainer.train()
    assert sorted(path.parent.name for path in tmp_path.glob("out/*/rollout_state.json")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    last = get_last_checkpoint(str(tmp_path / "out"))
    assert last is not None
    rest = train(tmp_path / "out", resume=Path(last), **saving)
    assert died.completions == whole.completions[:5]
    assert rest.completions == whole.completions[4:]


def test_checkpoint_of_another_trainer_starts_the_count_anew(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    (tmp_path / "checkpoint-2" / "rollout_state.json").unlink()
    rest = train(tmp_path, resume=tmp_path / "checkpoint-2", max_steps=3)
    assert len(rest.completions) == 1
