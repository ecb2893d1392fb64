"""What the engine computes for completions that are given, as it does for those that it generates."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .noise import token_logprobs
from .processors import widen
from .rows import Request, Rows
from .runner import EagerRunner


_LOGITS = 1 << 25
"""Logits that are computed at a time: 128 MiB in float32."""


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
        runner: new, over a cache of a row for each prompt and of `columns`, those of the longest text at least.
        prompts: `[length]` int64 each. Those that are equal are read once.
        completions: `[B, n]` int64, n > 0. What pads one is read like any token.
        layers: whose inputs are wanted, by transformers' count (:func:`keep_states`).
        process: the logits processors of a generation, on `[m, vocabulary]` scores.

    Returns:
        `[B, n]` float32 in nats, and for each of `layers` `[B, columns, hidden]`, by position: that of a row's last
        token, and those of its padding, have any values.
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
