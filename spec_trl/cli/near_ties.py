"""Whether a token that differs from that of "none" is a near-tie, which rounding decides, or an error.

The logits of one position differ in their last bits between forward shapes: the logit noise, which is measured. The
scores of both tokens are computed anew, by one unbatched forward of the row's prefix; it is a near-tie when both lie
closer to the best score than the noise.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..generation.engine.family_hooks import cache_argument
from ..generation.engine.noise import gumbel_noise, position_keys, stream_keys


NOISE_PROMPT = 8
"""Tokens of each text that are fed before the logit noise is measured on the rest."""


@dataclass(frozen=True)
class LogitNoise:
    """Largest and root mean square difference of one logit between forward shapes."""

    largest: float
    rms: float


@torch.no_grad()
def measure_logit_noise(model: PreTrainedModel, texts: Tensor, draft_length: int) -> LogitNoise:
    """Compare the logits of `texts` [batch, n] when fed by 1 token, by draft_length + 1 tokens, and all at once."""
    largest, squares, count = 0.0, 0.0, 0
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    name = cache_argument(model)
    for cache in caches:
        model(texts[:, :NOISE_PROMPT], **{name: cache})
    whole = torch.cat([model(text[None]).logits for text in texts])  # [batch, n, vocab], row by row
    width = draft_length + 1
    for start in range(NOISE_PROMPT, texts.shape[1] - width + 1, width):
        block = texts[:, start : start + width]  # [batch, width]
        steps = [model(token, **{name: caches[0]}).logits for token in block.split(1, dim=1)]
        singly = torch.cat(steps, dim=1).double()  # [batch, width, vocab]
        jointly = model(block, **{name: caches[1]}).logits.double()  # [batch, width, vocab]
        for other in (jointly, whole[:, start : start + width].double()):
            difference = singly - other  # [batch, width, vocab]
            largest = max(largest, difference.abs().max().item())
            squares += difference.square().sum().item()
            count += difference.numel()
    return LogitNoise(largest, math.sqrt(squares / count))


@torch.no_grad()
def reference_scores(
    model: PreTrainedModel, prefix: list[int], temperature: float, seed: int, row: int, at: int
) -> Tensor:
    """Scores [vocab] float64 of request `row` at generated position `at`, from one unbatched forward: logits over
    temperature, perturbed by the row's noise; at temperature 0 the logits themselves."""
    logits = model(torch.tensor([prefix], device=model.device)).logits[0, -1].double()  # [vocab]
    if temperature == 0:
        return logits
    streams = stream_keys(seed, torch.tensor([row], device=model.device))  # [1]
    keys = position_keys(streams, torch.tensor([[at]], device=model.device))  # [1, 1]
    noise = gumbel_noise(keys.view(-1), logits.shape[-1])[0]  # [vocab]
    return logits / temperature + noise  # [vocab]


def distance(scores: Tensor, tokens: tuple[int, int]) -> float:
    """How far the worse of two tokens lies below the best of `scores` [vocab]."""
    return (scores.max() - scores[list(tokens)].min()).item()
