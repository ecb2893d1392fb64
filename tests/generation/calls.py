"""One way to call the engine, and prompts to call it with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from spec_trl import SpeculativeOutput
from spec_trl.generation.engine.sampling.noise import gumbel_noise, position_keys, stream_keys
from spec_trl.generation.registry import CHOOSING


Prompts = dict[str, Tensor]


def pad_left(rows: Sequence[Tensor], width: int | None = None, pad: int = 0) -> Prompts:
    """Rows `[n_i]` int64 as left-padded `input_ids` and `attention_mask`, both `[B, width]`."""
    width = width or max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)  # [B, width]
    mask = torch.zeros_like(ids)  # [B, width]
    for ids_row, mask_row, row in zip(ids, mask, rows, strict=True):
        ids_row[width - len(row) :] = row
        mask_row[width - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def random_rows(lengths: Sequence[int], vocabulary: int = 64, seed: int = 0) -> list[Tensor]:
    """Token rows of these lengths, without the ids 0 to 2, which serve as pad and EOS."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def generate(
    model: PreTrainedModel,
    prompts: Prompts,
    strategy: str = "none",
    config: dict[str, Any] | None = None,
    **options: Any,
) -> SpeculativeOutput:
    """`model.generate` with a fixed seed, speculating in every round where one drafter drafts; samples from the full
    softmax at temperature 1 unless told otherwise."""
    toggle = "measured" if strategy in CHOOSING else "always"
    defaults = dict(do_sample=True, top_k=0, max_new_tokens=24, return_dict_in_generate=True, pad_token_id=0)
    return model.generate(
        **prompts,
        assistant_strategy=strategy,
        speculative_config={"seed": 0, "draft_kernel": "reference", "sd_toggle": toggle} | (config or {}),
        **(defaults | options),
    )


def outputs(result: SpeculativeOutput) -> list[list[int]]:
    """The generated tokens of each row, without padding."""
    assert result.sequences is not None and result.lengths is not None and result.logprobs is not None
    new = result.sequences[:, result.sequences.shape[1] - result.logprobs.shape[1] :]  # [B, new]
    return [row[:length].tolist() for row, length in zip(new, result.lengths.tolist(), strict=True)]


def reference_outputs(model: PreTrainedModel, prompts: Prompts, **options: Any) -> list[list[int]]:
    """What transformers' own greedy `generate` gives for each row on its own, without padding."""
    defaults = dict(do_sample=False, max_new_tokens=24, pad_token_id=0)
    found = []
    for ids, mask in zip(prompts["input_ids"], prompts["attention_mask"].bool(), strict=True):
        row = ids[mask][None]  # [1, n]
        found.append(
            model.generate(row, attention_mask=torch.ones_like(row), **(defaults | options))[0, row.shape[1] :]
        )
    return [tokens.tolist() for tokens in found]


class Alternate(LogitsProcessor):
    """Looks at the whole prefix and its length."""

    prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        parity = input_ids.sum(1, keepdim=True) % 2  # [n, 1]
        token = torch.arange(scores.shape[1])  # [V]
        return torch.where(token % 2 == parity, scores, scores - 2.0) + (token == input_ids.shape[1] % 64) * 3.0


class EndByPrefix(StoppingCriteria):
    """Ends a row where its newest token and its length add up to a multiple of `divisor`."""

    prefix_only = True

    def __init__(self, divisor: int = 17) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: Any) -> Tensor:
        return (input_ids[:, -1] + input_ids.shape[1]) % self.divisor == 0


class EachRound(StoppingCriteria):
    """Calls `action` with the number of each round, from 1 on, and stops nothing."""

    prefix_only = True

    def __init__(self, action: Callable[[int], None]) -> None:
        self.action, self.round = action, 0

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: Any) -> Tensor:
        self.round += 1
        self.action(self.round)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def plain_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> tuple[list[list[int]], list[list[float]]]:
    """What the engine must reproduce: `generate`'s loop over padded rows, one token at a time and without any cache,
    with the noise of seed 0; for `custom_generate`.

    Returns:
        Tokens and logprobs of each row, up to its end.
    """
    mask = model_kwargs["attention_mask"]  # [B, width]
    batch, width = input_ids.shape
    streams = stream_keys(0, torch.arange(batch))  # [B]
    tokens: list[list[int]] = [[] for _ in range(batch)]
    logprobs: list[list[float]] = [[] for _ in range(batch)]
    running = torch.ones(batch, dtype=torch.bool)
    while running.any():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]  # [B, V]
        scores = logits_processor(input_ids, logits.clone())  # [B, V]
        step = torch.full((batch, 1), input_ids.shape[1] - width)
        noise = gumbel_noise(position_keys(streams, step).flatten(), scores.shape[1])  # [B, V]
        chosen = (scores + noise if generation_config.do_sample else scores).argmax(1)  # [B]
        for row in running.nonzero().flatten().tolist():
            tokens[row].append(int(chosen[row]))
            logprobs[row].append(float(scores[row].log_softmax(0)[chosen[row]]))
        input_ids = torch.cat([input_ids, torch.where(running, chosen, 0)[:, None]], dim=1)
        mask = torch.cat([mask, running.long()[:, None]], dim=1)
        running &= ~stopping_criteria(input_ids, None)
    return tokens, logprobs
