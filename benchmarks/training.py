"""One GRPO run under the clock: what is trained, what it sampled, and where its time went.

The demo's task is a real one, and so are questions to a chat model. For any other model prompts are beginnings of
texts, or random tokens in a `shape:` model's vocabulary, and the reward is the share of odd token ids: it differs
between completions, which is all that timing a training step needs.
"""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
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
from spec_trl.trainers.step_clock import StepClock

from .models import LoadedModel, load_model
from .workload import prompt_source


DEMO = "demo"


@dataclass(frozen=True)
class TrainingTask:
    """One training job; `make_policy` gives the same weights every time.

    Args:
        make_policy: a fresh policy.
        tokenizer: its tokenizer.
        dataset: column "prompt", and what the reward reads.
        reward: TRL reward function.
        facts: of the model, for the result.
        longest_prompt: tokens.
        settings: GRPOConfig fields; also the defaults of the command's options.
    """

    make_policy: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerFast
    dataset: Dataset
    reward: Callable[..., list[float]]
    facts: dict[str, object]
    longest_prompt: int
    settings: dict[str, Any]


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


def model_task(
    spec: str, dtype: torch.dtype, max_completion_length: int, questions: int, seed: int, agreement: float,
    prompts: Path | None, before_end: int | None,
) -> TrainingTask:  # fmt: skip
    """Any causal LM of `benchmarks.models`.

    Args:
        spec: folder, or `shape:` with a name or a config.
        dtype: of the weights.
        max_completion_length: tokens; shape models: completions are about half as long on average.
        questions: distinct prompts.
        seed: of synthetic weights, of random prompts, and of the tokens that end a shape model's completions.
        agreement: shape models: overlap with the 4-bit copy.
        prompts: JSON list of strings; None: the stories in examples/data.
        before_end: as of `prompt_source`.
    """
    loaded = load_model(spec, dtype, "cpu", agreement, seed)
    ids = prompt_source(loaded, prompts, questions, seed, before_end)
    if loaded.tokenizer is None:
        tokenizer = _id_tokenizer(loaded, max_completion_length // 2, seed)
        texts = [" ".join(map(_word, row)) for row in ids]
    else:
        tokenizer = loaded.tokenizer
        if before_end is not None:  # after the token that begins a text, a model would begin one
            tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    longest = max(map(len, tokenizer(texts)["input_ids"]))
    dataset = Dataset.from_dict({"prompt": texts})
    return TrainingTask(
        lambda: copy.deepcopy(loaded.model), tokenizer, dataset, odd_share, loaded.facts, longest, SMALL_STEPS
    )


def question_task(
    spec: str, dtype: torch.dtype, max_completion_length: int, questions: int, file: Path
) -> TrainingTask:
    """A checkpoint that answers questions, which come in its chat template if it has one.

    Args:
        spec: folder of the checkpoint.
        dtype: of the weights.
        max_completion_length: tokens; longer questions than leave so many are left out.
        questions: distinct ones, the first of the file.
        file: .jsonl with "question" and "answer", as of GSM8K.

    Raises:
        ValueError: no question fits.
    """
    loaded = load_model(spec, dtype, "cpu")
    assert loaded.tokenizer is not None
    context = loaded.model.config.get_text_config(decoder=True).max_position_embeddings
    dataset = grpo_gsm8k.build_dataset(str(file), loaded.tokenizer, context - max_completion_length)
    dataset = dataset.select(range(min(questions, len(dataset))))
    written = dataset["prompt"][:]
    if loaded.tokenizer.chat_template is not None:
        written = loaded.tokenizer.apply_chat_template(written, add_generation_prompt=True, tokenize=False)
    longest = max(map(len, loaded.tokenizer(written, add_special_tokens=False)["input_ids"]))
    return TrainingTask(
        lambda: copy.deepcopy(loaded.model), loaded.tokenizer, dataset, grpo_gsm8k.answer_reward, loaded.facts,
        longest, SMALL_STEPS,
    )  # fmt: skip


def _id_tokenizer(loaded: LoadedModel, mean_length: int, seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer that writes tokens as their ids, for a model without one.

    Random tokens are made to end a completion, as many as make its mean length about `mean_length`: rollouts without a
    long tail would show nothing of what the toggle is for (ER §2.3).
    """
    vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(vocabulary / mean_length))
    ends = (1 + torch.randperm(vocabulary - 1, generator=generator)[:count]).sort().values.tolist()  # 0 pads
    loaded.model.generation_config.eos_token_id = ends
    words = {_word(token): token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_word(0), eos_token=_word(ends[0]), padding_side="left"
    )


def _word(token: int) -> str:
    """Special tokens are found inside of words too, so no word may be part of another."""
    return f"<{token}>"


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
    # Both trainers seed torch anew; what one leaves behind must not slow the next.
    if fields is None:
        trainer = TimedGRPOTrainer(args=GRPOConfig(output_dir=str(folder), **shared), **arguments)
    else:
        trainer = SpecGRPOTrainer(args=SpecGRPOConfig(output_dir=str(folder), **shared, **fields), **arguments)
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
