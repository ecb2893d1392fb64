"""What a run leaves behind for `spec-trl report`, and the alarm over a drafter that lost its policy."""

import warnings
from pathlib import Path

import pytest
import torch

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.trainers.run_log import read_run
from tests.trainers.harness import make_trainer, tiny_dataset, train


def test_log_has_every_rollout_and_step(tmp_path: Path) -> None:
    trainer, run = make_trainer(
        tmp_path, max_steps=4, draft_lengths=[3], eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
        trainer={"eval_dataset": tiny_dataset(1)},
    )  # fmt: skip
    trainer.train()
    log = read_run(tmp_path)
    assert log.header.strategy == "self" and log.header.settings["draft_lengths"] == [3]
    assert log.header.dtype == "float64"
    train_records, steps = log.of("train"), log.steps
    assert [record.rollout for record in train_records] == [record.step for record in train_records] == [0, 1, 2, 3]
    assert [record.step for record in steps] == [1, 2, 3, 4]
    assert [record.step for record in log.of("eval")] == [2, 4]
    rewards = run.metric("reward")
    for record, step, reward in zip(train_records, steps, rewards, strict=True):
        assert step.reward == pytest.approx(reward)
        # The phases make up the step, and the rollout is the one that was logged.
        assert sum(step.phases.values()) == pytest.approx(step.seconds, rel=0.02)
        assert min(step.phases.values()) >= 0 and step.phases["update"] > 0 and step.phases["reward"] > 0
        assert record.seconds <= step.phases["rollout"] <= step.seconds
    for name in ("block_efficiency", "acceptance_rate", "first_token_acceptance", "target_entropy", "sd_on_fraction"):
        assert [getattr(record, name) for record in train_records] == pytest.approx(run.metric(f"rollout/{name}"))
    for record, completions in zip(train_records, run.completions, strict=True):
        assert (record.drafter, record.draft_length, record.requests) == ("self", 3, 8)
        assert record.tokens == sum(map(len, completions))
        assert record.completion_curve[-1][1] == 8
        assert sum(point.rounds for point in record.points) == record.rounds
        assert sum(point.tokens for point in record.points) == record.tokens
        assert sum(point.rounds * point.seconds for point in record.points) <= record.seconds
        assert record.per_depth[0].committed <= record.tokens
        assert record.speculating[0] == (0, 3)
        assert sorted(timeline.request for timeline in record.timeline) == list(range(8))
        assert record.timeline[-1].ended == record.completion_curve[-1][0] <= record.seconds
        assert all(timeline.changes[0][1:] == (0, ["self"]) for timeline in record.timeline)
        # Making the drafter counts, as requantizing does; at step 2 the evaluation came first and paid for it.
        assert 0 <= record.refresh_seconds < record.seconds and (record.refresh_seconds > 0) == (record.step != 2)
    tails = [
        record.completion_curve[-1][0] - next(second for second, done in record.completion_curve if done >= 4)
        for record in train_records
    ]
    assert run.metric("rollout/tail_seconds") == pytest.approx(tails)


def test_without_a_drafter(tmp_path: Path) -> None:
    train(tmp_path, "none")
    log = read_run(tmp_path)
    assert len(log.rollouts) == len(log.steps) == 3
    for record in log.rollouts:
        assert record.drafter is record.block_efficiency is record.mean_draft_length is None
        assert record.sd_on_fraction == 0 and record.speculating == [(0, 0)]


def test_resumed_run_appends(tmp_path: Path) -> None:
    saving = dict(save_strategy="steps", save_steps=2)
    train(tmp_path, max_steps=3, **saving)
    train(tmp_path, max_steps=4, resume=tmp_path / "checkpoint-2", **saving)
    log = read_run(tmp_path)
    assert len(log.headers) == 2
    assert [record.step for record in log.rollouts] == [0, 1, 2, 3]
    assert [record.step for record in log.steps] == [1, 2, 3, 4]


def test_toggle_is_seen(tmp_path: Path, profiles: dict[str, str]) -> None:
    train(tmp_path, sd_toggle="roofline", roofline_profile=profiles["pays"], max_completion_length=48)
    log = read_run(tmp_path)
    assert log.header.profile == str(tmp_path / "roofline_profile.json") and Path(log.header.profile).exists()
    record = log.rollouts[0]
    assert record.predicted_speedup is not None and record.predicted_speedup > 1
    assert [length > 0 for _, length in record.speculating][:2] == [False, True]
    assert {point.draft_length for point in record.points} >= {0, 5}
    assert record.phase_seconds["control"] > 0


def test_awq_learns_from_the_training_forwards(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, max_steps=1, draft_quantization="awq-w4-g128")
    trainer.train()
    layer = trainer._drafters[0].quantized.layers["model.layers.0.self_attn.q_proj"]
    assert torch.equal(layer.inverse_scales, torch.ones_like(layer.inverse_scales))  # nothing was seen before
    trainer, _ = make_trainer(tmp_path, max_steps=2, draft_quantization="awq-w4-g128")
    trainer.train()
    scaled = [
        not torch.equal(layer.inverse_scales, torch.ones_like(layer.inverse_scales))
        for layer in trainer._drafters[0].quantized.layers.values()
    ]
    assert any(scaled)


def damage_at_refresh(patch: pytest.MonkeyPatch, number: int) -> None:
    """From its `number`-th refresh on the drafter holds noise."""
    refresh, count = SelfDrafter.refresh, [0]

    def damaged(drafter: SelfDrafter, statistics: object = None) -> None:
        refresh(drafter)
        count[0] += 1
        if count[0] >= number:
            torch.manual_seed(count[0])
            for layer in drafter.quantized.layers.values():
                for buffer in layer.packed.buffers():
                    if buffer.is_floating_point():
                        buffer.copy_(buffer[torch.randperm(len(buffer))].flip(-1) * -1)

    patch.setattr(SelfDrafter, "refresh", damaged)


def test_collapse_of_acceptance_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage_at_refresh(monkeypatch, 2)
    with pytest.warns(UserWarning, match="the drafter 'self' fell from 0.[3-9].* to 0.[01]") as seen:
        train(tmp_path, max_steps=5, max_completion_length=64)
    assert len([warning for warning in seen if "acceptance rate" in str(warning.message)]) == 1


def test_steady_acceptance_does_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*acceptance rate")
        train(tmp_path, max_steps=4, max_completion_length=64)
