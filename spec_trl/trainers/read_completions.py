"""Reads completions with the sampler's engine, as they were generated: log-probabilities, and inputs of layers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..generation.engine.forwards.runner import EagerRunner
from ..generation.engine.network.media import MediaPrompt
from ..generation.engine.rows import Request, Rows, Spans
from ..generation.engine.sampling.noise import token_logprobs, widen
from ..generation.engine.saved_row import TARGET, SavedRow


_LOGITS = 1 << 25
"""Most logits computed at a time: 128 MiB in float32."""


@torch.no_grad()
def read_completions(
    runner: EagerRunner,
    prompts: Sequence[Tensor],
    completions: Tensor,
    layers: Sequence[int],
    process: Callable[[Tensor, Tensor, Tensor], Tensor],
    turns: Sequence[Sequence[range]] | None = None,
    media: Sequence[MediaPrompt | None] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of `completions`, and hidden states.

    Args:
        runner: new, over a cache with a row per prompt, and columns for the longest text; with several turns, for the
            longest turn after it.
        prompts: `[length]` int64 each. Equal prompts are read once.
        completions: `[B, n]` int64, n > 0. Padding is read like any token.
        layers: whose inputs are returned, in transformers' count (:func:`keep_states`).
        process: the logits processors of a generation, on scores `[b, q, vocabulary]` of the rows `[b]` int64, in the
            order of prompts, at the columns `[b, q]` int64 of completions.
        turns: of each row, columns of completions that were generated in one turn, ascending; a tool wrote the rest.
            None: one turn wrote all.
        media: of each prompt; None: there is none.

    Returns:
        `[B, n]` float32 in nats, 0 where a tool wrote, and for each of `layers` `[B, columns, hidden]`, by position;
        values at a row's last token and at padding are undefined.
    """
    columns, device = runner.cache.columns, completions.device
    turns, media = turns or [(range(completions.shape[1]),)] * len(prompts), media or [None] * len(prompts)
    logprobs, states, saved = torch.zeros(completions.shape), list[Tensor](), dict[int, SavedRow]()
    texts = [torch.cat([prompt, row]) for prompt, row in zip(prompts, completions.cpu(), strict=True)]

    def store(features: Tensor, positions: Tensor, first: int) -> None:
        if not states:
            states.extend(features.new_zeros(len(prompts), columns, part.shape[2]) for part in split(features))
        to = torch.tensor(rows.indices[first : first + len(positions)])[:, None]  # [b, 1]
        for state, part in zip(states, split(features), strict=True):
            state[to, positions] = part

    def split(features: Tensor) -> tuple[Tensor, ...]:
        return features.chunk(len(layers), dim=-1)  # [b, q, hidden] each

    def score(logits: Tensor, first: int) -> Tensor:
        at = torch.arange(first, first + logits.shape[1])  # tokens of the turn
        places = (begins[:, None] + at).clamp(max=completions.shape[1] - 1)  # [b, q]
        scores = process(widen(logits), order, places)
        return token_logprobs(scores, tokens[:, first : first + logits.shape[1]]).float()  # [b, q]

    if layers:
        runner.listen(layers, store)
    for turn in range(max(map(len, turns))):
        rows = Rows(runner.cache.rows, columns, device)
        requests = []
        for index, (text, prompt, own) in enumerate(zip(texts, prompts, turns, strict=True)):
            if turn < len(own):
                spans: Spans = tuple((len(prompt) + one[0], len(prompt) + one[-1]) for one in own[:turn])
                start, end = len(prompt) + own[turn].start, len(prompt) + own[turn].stop
                request = Request(index, text[:start], end, 0, saved.pop(index, None), spans, media[index], device)
                requests.append(request)
        admission = rows.admit(requests)
        _, logits = runner.read_prompts(rows, admission)  # [leaders, 1, V]
        assert logits is not None
        order = torch.tensor(rows.indices)  # [b]
        for state in states:
            state[order[admission.followers]] = state[order[admission.sources]]
        lengths = [len(turns[index][turn]) for index in rows.indices]
        length, begins = max(lengths), torch.tensor([turns[index][turn].start for index in rows.indices])
        for row, index in enumerate(rows.indices):
            rows.tokens[row, rows.host_lengths[row] : len(texts[index])] = texts[index][rows.host_lengths[row] :]
        tokens = rows.window(0, length)  # [b, length]
        scores = [score(logits[[*admission.first_token_rows.values()]], 0)]
        most = max(_LOGITS // (len(requests) * logits.shape[2]), 1)
        for first in range(0, length - 1, most):
            count = min(most, length - 1 - first)
            logits = runner.forward(rows.window(first, count), rows.columns_after(first, count), columns)
            runner.cache.commit([min(max(own - 1 - first, 0), count) for own in lengths])
            scores.append(score(logits, first + 1))
        for row, (index, values) in enumerate(zip(rows.indices, torch.cat(scores, dim=1), strict=True)):
            own = turns[index]
            logprobs[index, own[turn].start : own[turn].stop] = values[: lengths[row]]
            if turn + 1 < len(own):  # the next turn reads the last token
                end = len(prompts[index]) + own[turn][-1]
                kv = runner.cache.export_row(row, 0, end)
                saved[index] = SavedRow(None, None, 0, {TARGET: (end, partial(dict[Any, Any], kv))})
    return logprobs, states
