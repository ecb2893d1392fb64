"""One GRPO run under the clock: what is trained, what it sampled, and where its time went.

The demo's task is a real one, and so are questions to a chat model. For any other model prompts are beginnings of
texts, and the reward is the share of odd token ids: it differs between completions, which is all that timing a
training step needs.
"""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from examples import grpo_gsm8k
from examples.demo.pretrain import POLICY
from examples.demo.task import MAX_COMPLETION_LENGTH, build_dataset, exact_match
from spec_trl import SpecGRPOConfig, SpecGRPOTrainer
from spec_trl.trainers.run_log import RolloutRecord, StepRecord, read_run
from spec_trl.trainers.step_totals import StepClock

from .models import load_model
from .workload import prompt_source


DEMO = "demo"


@dataclass(frozen=True)
class TrainingTask:
    """One training job."""

    make_policy: Callable[[], PreTrainedModel]  # the same weights every time
    tokenizer: PreTrainedTokenizerFast
    dataset: Dataset  # column "prompt", and what the reward reads
    reward: Callable[..., list[float]]
    facts: dict[str, object]  # of the model, for the result
    longest_prompt: int  # tokens
    settings: dict[str, Any]  # GRPOConfig fields


@dataclass(frozen=True)
class Size:
    """How much is generated and trained: optimizer steps, rows per step, completions per prompt, tokens per row."""

    steps: int
    rows: int
    group: int
    max_completion_length: int


DEMO_SIZE = Size(steps=12, rows=64, group=8, max_completion_length=MAX_COMPLETION_LENGTH)
OTHER_SIZE = Size(steps=5, rows=8, group=4, max_completion_length=64)
# So small that weights in bfloat16 stay what they are; requantizing and updating cost the same.
SMALL_STEPS: dict[str, Any] = dict(learning_rate=1e-6, lr_scheduler_type="constant")


def odd_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward for TRL: share of odd token ids."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def demo_task(dtype: torch.dtype, questions: int, seed: int) -> TrainingTask:
    """The demo's policy and task with so many distinct questions, drawn by `seed`."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)

    def make_policy() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(POLICY, dtype=dtype)

    dataset = build_dataset(questions, seed)
    facts = {"model": "the demo's policy", "dtype": str(dtype).removeprefix("torch."), "synthetic_weights": False}
    facts["parameters"] = make_policy().num_parameters()
    longest = max(map(len, tokenizer(dataset["prompt"][:])["input_ids"]))
    # Of examples/demo/run.py, where the policy learns with them.
    settings = dict(learning_rate=2e-4, lr_scheduler_type="constant_with_warmup", warmup_steps=3)
    return TrainingTask(make_policy, tokenizer, dataset, exact_match, facts, longest, settings)


def text_task(spec: str, dtype: torch.dtype, questions: int, seed: int, prompts: Path | None) -> TrainingTask:
    """A checkpoint in the folder `spec` that goes on with beginnings of texts: `questions` of `prompts`, a JSON list
    of strings, or of the stories in examples/data."""
    loaded = load_model(spec, dtype, "cpu")
    assert loaded.tokenizer is not None
    texts = loaded.tokenizer.batch_decode(prompt_source(loaded, prompts, questions, seed), skip_special_tokens=True)
    longest = max(map(len, loaded.tokenizer(texts)["input_ids"]))
    dataset, make_policy = Dataset.from_dict({"prompt": texts}), lambda: copy.deepcopy(loaded.model)
    return TrainingTask(make_policy, loaded.tokenizer, dataset, odd_share, loaded.facts, longest, SMALL_STEPS)


def question_task(
    spec: str, dtype: torch.dtype, max_completion_length: int, questions: int, file: Path
) -> TrainingTask:
    """A checkpoint in the folder `spec` that answers the first `questions` of `file`, .jsonl with "question" and
    "answer" as of GSM8K, in its chat template if it has one. Questions that leave no room for
    `max_completion_length` tokens are left out."""
    loaded = load_model(spec, dtype, "cpu")
    assert loaded.tokenizer is not None
    context = loaded.model.config.get_text_config(decoder=True).max_position_embeddings
    dataset = grpo_gsm8k.build_dataset(str(file), loaded.tokenizer, context - max_completion_length)
    dataset = dataset.select(range(min(questions, len(dataset))))
    written = dataset["prompt"][:]
    if loaded.tokenizer.chat_template is not None:
        written = loaded.tokenizer.apply_chat_template(written, add_generation_prompt=True, tokenize=False)
    longest = max(map(len, loaded.tokenizer(written, add_special_tokens=False)["input_ids"]))
    make_policy, reward = lambda: copy.deepcopy(loaded.model), grpo_gsm8k.answer_reward
    return TrainingTask(make_policy, loaded.tokenizer, dataset, reward, loaded.facts, longest, SMALL_STEPS)


# ---- runs ----------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """One training run: what the clocks said, and what was sampled in each step. `rollouts` is empty for TRL's own."""

    steps: list[StepRecord]
    rollouts: list[RolloutRecord]
    completions: list[list[list[int]]]

    @property
    def preparation_seconds(self) -> list[float]:
        """Making and requantizing drafters, by step."""
        return [record.refresh_seconds for record in self.rollouts] or [0.0] * len(self.steps)

    @property
    def rollout_seconds(self) -> list[float]:
        """Generating without the preparation, by step."""
        pairs = zip(self.steps, self.preparation_seconds, strict=True)
        return [step.phases["rollout"] - preparation for step, preparation in pairs]


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
        max_steps=size.steps, per_device_train_batch_size=size.rows, num_generations=size.group,
        max_completion_length=size.max_completion_length, loss_type="grpo", temperature=1.0, beta=0.0, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=on_cpu, bf16=False,
        gradient_checkpointing=False, seed=seed,
    )  # fmt: skip


def config_fields(options: dict[str, Any]) -> dict[str, Any]:
    """`options` as fields of SpecGRPOConfig: those that it lacks go into its `speculative_config`."""
    own = {name: value for name, value in options.items() if name in SpecGRPOConfig.__dataclass_fields__}
    return own | {"speculative_config": {name: value for name, value in options.items() if name not in own}}


def train(
    task: TrainingTask, fields: dict[str, Any] | None, shared: dict[str, Any], folder: Path, bar: tqdm
) -> Training:
    """Trains once with `fields` (:func:`config_fields`; None: TRL's own trainer) and `shared` ones of GRPOConfig;
    `folder` is for the run's log, and `bar` is moved by one per step."""
    completions: list[list[list[int]]] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        completions.append([list(ids) for ids in completion_ids])
        return task.reward(completion_ids=completion_ids, **columns)

    arguments: dict[str, Any] = dict(
        model=task.make_policy(), reward_funcs=reward, train_dataset=task.dataset, processing_class=task.tokenizer,
        callbacks=[_Progress(bar)],
    )  # fmt: skip
    # Both trainers seed torch anew; what one leaves behind must not slow the next.
    if fields is None:
        trainer = TimedGRPOTrainer(args=GRPOConfig(output_dir=str(folder), **shared), **arguments)
    else:
        config = SpecGRPOConfig(output_dir=str(folder), **shared, **config_fields(fields))
        trainer = SpecGRPOTrainer(args=config, **arguments)
    trainer.remove_callback(PrinterCallback)  # comes with disable_tqdm
    trainer.train()
    if fields is None:
        result = Training(trainer.steps, [], completions)
    else:
        run = read_run(folder)
        result = Training(run.steps, run.of("train"), completions)
    del trainer, arguments
    gc.collect()
    return result
