"""What the end-to-end benchmark trains: a policy, questions and a reward.

The demo's task is a real one, and so are questions to a chat model. For any other model prompts are beginnings of
texts, or random tokens in a `shape:` model's vocabulary, and the reward is the share of odd token ids: it differs
between completions, which is all that timing a training step needs.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from examples import grpo_gsm8k
from examples.demo.pretrain import POLICY
from examples.demo.task import MAX_COMPLETION_LENGTH, build_dataset, exact_match

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
    """The demo's policy and task.

    Args:
        dtype: of the weights.
        questions: distinct ones.
        seed: of the questions.
    """
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
    spec: str,
    dtype: torch.dtype,
    max_completion_length: int,
    questions: int,
    seed: int,
    agreement: float,
    prompts: Path | None,
    before_end: int | None,
) -> TrainingTask:
    """Any causal LM of `benchmarks.models`.

    Args:
        spec: folder, `wide:` with a folder and a factor, or `shape:` with a name or a config.
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
