"""What would end a run in one of its rollouts, refused before any work, or by the name of the prompt."""

import math
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..generation.configuration import SpeculativeConfig
from ..generation.engine.captured import runner_mode
from ..generation.engine.requirements import (
    check_generation_config,
    check_lengths,
    check_model,
    check_not_diverted,
    position_limit,
)


_LOOKED_AT = 1024  # rows of a dataset whose texts are compared, spread over it
_TOKENIZED = 16  # the longest texts of them


def check_generation(
    policy: PreTrainedModel,
    config: SpeculativeConfig,
    generation_config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> None:
    """Raises ValueError for what would end the first rollout, perhaps after minutes of calibrating."""
    check_model(policy)
    runner_mode(config, device)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
    try:
        check_not_diverted(policy, generation_config, {})
        completed, _ = policy._prepare_generation_config(generation_config)
        check_generation_config(completed, policy.generation_config)
        # generate as in a rollout, up to its decoding method: it makes all processors and criteria, and no forward.
        rows: int = policy.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=generation_config, tokenizer=tokenizer,
            custom_generate=_count_rows,
        )  # fmt: skip
        if rows > 1:
            raise ValueError(
                f"num_return_sequences={rows} contradicts num_generations, which says how many completions a prompt "
                "has. Leave it unset."
            )
    except Exception as error:
        raise ValueError(
            f"{error} Look in generation_kwargs, cache_implementation and the model's own generation_config, or "
            "use trl.GRPOTrainer."
        ) from error


def _count_rows(model: PreTrainedModel, input_ids: Tensor, *_: Any, **__: Any) -> int:
    return len(input_ids)


def check_dataset(
    policy: PreTrainedModel,
    generation_config: GenerationConfig,
    name: str,
    dataset: object,
    tokenize: Callable[[list[Any]], Any],
) -> None:
    """Raises ValueError, naming the row, where a prompt of `dataset`, or of one of a dict of datasets, cannot be
    served because positions of `policy` end. Reads a part of a large one; `tokenize` returns token ids first."""
    if position_limit(policy) is None:
        return
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_dataset(policy, generation_config, f"{name}[{key!r}]", part, tokenize)
    if not isinstance(dataset, Dataset) or not len(dataset) or "prompt" not in dataset.column_names:
        return
    rows = range(0, len(dataset), math.ceil(len(dataset) / _LOOKED_AT))
    texts = dataset.select(rows)["prompt"]
    longest = sorted(range(len(rows)), key=lambda place: len(str(texts[place])))[-_TOKENIZED:]
    try:
        ids = tokenize([texts[place] for place in longest])[0]
    except Exception:  # some prompts become text when they are drawn; what is wrong with others is said then
        return
    _check(policy, generation_config, ids, lambda at: f"{name}[{rows[longest[at]]}]['prompt']")


def check_drawn(
    policy: PreTrainedModel,
    generation_config: GenerationConfig,
    prompts: list[list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The same for the token ids of a rollout's `prompts`; the error shows the prompt."""

    def name(row: int) -> str:
        text = tokenizer.decode(prompts[row])
        return f"the prompt {text if len(text) <= 160 else f'{text[:60]} ... {text[-100:]}'!r}"

    if prompts and position_limit(policy) is not None:
        _check(policy, generation_config, prompts, name)


def _check(
    policy: PreTrainedModel, generation_config: GenerationConfig, ids: list[list[int]], name: Callable[[int], str]
) -> None:
    check_lengths(policy, list(map(len, ids)), generation_config.max_new_tokens or 0, name)
