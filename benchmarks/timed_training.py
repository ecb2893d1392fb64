"""One GRPO run of the end-to-end benchmark: what it sampled, and where its time went."""

import gc
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from spec_trl import SpecGRPOConfig, SpecGRPOTrainer
from spec_trl.trainers.run_log import RolloutRecord, StepRecord, read_run
from spec_trl.trainers.step_clock import StepClock

from .training_task import Size, TrainingTask


@dataclass
class Training:
    """One training run: what was sampled in each step, and what the clocks said. `rollouts` is empty for TRL's own."""

    steps: list[StepRecord]
    rollouts: list[RolloutRecord]
    completions: list[list[list[int]]]
    seconds: float

    @property
    def rewards(self) -> list[float]:
        """Mean reward, by step."""
        return [math.nan if step.reward is None else step.reward for step in self.steps]

    @property
    def preparation_seconds(self) -> list[float]:
        """Making and requantizing drafters, by step."""
        return [record.refresh_seconds for record in self.rollouts] or [0.0] * len(self.steps)

    @property
    def rollout_seconds(self) -> list[float]:
        """Generating without the preparation, by step."""
        return [
            step.phases["rollout"] - preparation
            for step, preparation in zip(self.steps, self.preparation_seconds, strict=True)
        ]


class TimedGRPOTrainer(GRPOTrainer):
    """TRL's trainer under the same clock as ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[StepRecord] = []
        self._clock = StepClock(self.accelerator.device, self._log_step)
        self.add_callback(self._clock)

    def _log_step(self, step: int, seconds: float, phases: dict[str, float]) -> None:
        self.steps.append(StepRecord(step, seconds, phases, self._metrics["train"]["reward"][-1]))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self._clock.phase("prepare"):
            return super()._prepare_inputs(generation_batch)

    def _generate(self, prompts: list[Any]) -> Any:
        with self._clock.phase("rollout"):
            return super()._generate(prompts)


class _Progress(TrainerCallback):
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._bar.update()


def settings_of(task: TrainingTask, size: Size, seed: int, on_cpu: bool) -> dict[str, Any]:
    """GRPOConfig fields that all methods share."""
    return task.settings | dict(
        max_steps=size.steps,
        per_device_train_batch_size=size.rows,
        num_generations=size.group,
        max_completion_length=size.max_completion_length,
        loss_type="grpo",
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
    )


def train(
    task: TrainingTask, fields: dict[str, Any] | None, shared: dict[str, Any], folder: Path, bar: tqdm
) -> Training:
    """Trains once.

    Args:
        task: what.
        fields: of SpecGRPOConfig; None: TRL's own trainer.
        shared: of GRPOConfig.
        folder: for the run's log.
        bar: moved by one per step.
    """
    completions: list[list[list[int]]] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        completions.append([list(ids) for ids in completion_ids])
        return task.reward(completion_ids=completion_ids, **columns)

    arguments: dict[str, Any] = dict(
        model=task.make_policy(),
        reward_funcs=reward,
        train_dataset=task.dataset,
        processing_class=task.tokenizer,
        callbacks=[_Progress(bar)],
    )
    started = time.perf_counter()
    # Both trainers seed torch anew; what one leaves behind must not slow the next.
    if fields is None:
        trainer = TimedGRPOTrainer(args=GRPOConfig(output_dir=str(folder), **shared), **arguments)
    else:
        trainer = SpecGRPOTrainer(args=SpecGRPOConfig(output_dir=str(folder), **shared, **fields), **arguments)
    trainer.remove_callback(PrinterCallback)  # comes with disable_tqdm
    trainer.train()
    seconds = time.perf_counter() - started
    if fields is None:
        result = Training(trainer.steps, [], completions, seconds)
    else:
        run = read_run(folder)
        result = Training(run.steps, run.of("train"), completions, seconds)
    del trainer, arguments
    gc.collect()
    return result
