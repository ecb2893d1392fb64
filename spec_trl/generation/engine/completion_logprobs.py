"""Log-probabilities of completions, computed by the engine as in generation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .noise import token_logprobs
from .processors import widen
from .rows import Request, Rows
from .runner import EagerRunner


_LOGITS = 1 << 25
"""Most logits computed at a time: 128 MiB in float32."""


@torch.no_grad()
def read_completions(
    runner: EagerRunner,
    prompts: Sequence[Tensor],
    completions: Tensor,
    layers: Sequence[int],
    process: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of `completions`, and hidden states.

    Args:
        runner: new, over a cache with a row per prompt, and columns for the longest text.
        prompts: `[length]` int64 each. Equal prompts are read once.
        completions: `[B, n]` int64, n > 0. Padding is read like any token.
        layers: whose inputs are returned, in transformers' count (:func:`keep_states`).
        process: the logits processors of a generation, on `[m, vocabulary]` scores.

    Returns:
        `[B, n]` float32 in nats, and for each of `layers` `[B, columns, hidden]`, by position; values at a row's last
        token and at padding are undefined.
    """
    rows, columns = Rows(runner.cache.rows, runner.cache.columns, completions.device), runner.cache.columns
    length, states = completions.shape[1], list[Tensor]()

    def hear(features: Tensor, positions: Tensor, first: int) -> None:
        if not states:
            states.extend(features.new_zeros(len(prompts), columns, part.shape[2]) for part in split(features))
        to = torch.tensor(rows.indices[first : first + len(positions)])[:, None]  # [b, 1]
        for state, part in zip(states, split(features), strict=True):
            state[to, positions] = part

    def split(features: Tensor) -> tuple[Tensor, ...]:
        return features.chunk(len(layers), dim=-1)  # [b, q, hidden] each

    def score(logits: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(process(widen(logits).flatten(0, 1)).view(logits.shape), tokens).float()  # [b, q]

    if layers:
        runner.listen(layers, hear)
    admission = rows.admit([Request(at, own, len(own) + length, 0) for at, own in enumerate(prompts)])
    _, logits = runner.read_prompts(rows, admission)  # [leaders, 1, V]
    assert logits is not None
    order = torch.tensor(rows.indices)  # [B]
    tokens = completions[order]  # [B, n]
    rows.write(0, tokens)
    for state in states:
        state[order[admission.followers]] = state[order[admission.sources]]
    found = [score(logits[[*admission.begun.values()]], tokens[:, :1])]
    most = max(_LOGITS // (len(prompts) * logits.shape[2]), 1)
    for first in range(0, length - 1, most):
        count = min(most, length - 1 - first)
        logits = runner.forward(rows.window(first, count), rows.columns_after(first, count), columns)
        found.append(score(logits, tokens[:, first + 1 : first + 1 + count]))
    logprobs = torch.empty(completions.shape)
    logprobs[order] = torch.cat(found, dim=1)
    return logprobs, states
