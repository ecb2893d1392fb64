"""Captures hidden states of a target."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from .shadow import decoder_layers


def keep_states(network: PreTrainedModel, layers: Iterable[int], states: dict[int, Tensor]) -> list[RemovableHandle]:
    """Has every forward of `network` leave its hidden states `[B, q, hidden]` in `states`, in place of those of the
    forward before, until its hooks go; raises ValueError where it has no such layer.

    `layers` go by transformers' count: 0 is the embedding's output, i the input of layer i, and the number of layers
    the output of the final norm.
    """
    layers, blocks = list(dict.fromkeys(layers)), decoder_layers(network)
    beyond = [index for index in layers if not 0 <= index <= len(blocks)]
    if beyond:
        raise ValueError(
            f"layers={layers}: hidden states {beyond} are asked for, and {type(network).__name__} has those of 0 to "
            f"{len(blocks)}."
        )

    def keep_input(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[index] = args[0] if args else kwargs["hidden_states"]

    def keep_output(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        states[len(blocks)] = output.last_hidden_state

    return [
        blocks[index].register_forward_pre_hook(partial(keep_input, index), with_kwargs=True)
        if index < len(blocks)
        else network.get_decoder().register_forward_hook(keep_output)
        for index in layers
    ]


@torch.no_grad()
def observe(target: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Runs the target, in eval mode, over whole sequences `tokens` `[B, T]` int64 from position 0.

    They are right-padded: attention is causal, so padding changes no real position.

    Returns:
        The hidden states of `layers` (in transformers' count; none is fine) next to each other,
        `[B, T, len(layers) * H_t]`, and what the output embedding takes, `[B, T, H_t]`.
    """
    states: dict[int, Tensor] = {}
    hidden: list[Tensor] = []

    def keep_hidden(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden.append(args[0])
        return (args[0][:, -1:],)  # logits are computed later, in pieces

    hooks = keep_states(target, layers, states)
    hooks.append(target.get_output_embeddings().register_forward_pre_hook(keep_hidden))
    try:
        target(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    features = [states[index] for index in layers] or [hidden[0][..., :0]]
    return torch.cat(features, dim=-1), hidden[0]
