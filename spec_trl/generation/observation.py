"""What a target thinks of whole sequences, outside the engine."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .shadow import decoder_layers


@torch.no_grad()
def observe(target: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Runs the target over whole sequences from position 0.

    Args:
        target: in eval mode.
        tokens: `[B, T]` int64, right-padded: attention is causal, so padding changes no real position.
        layers: hidden states to keep, in transformers' count; none is fine.

    Returns:
        Those side by side, `[B, T, len(layers) * H_t]`, and what the output embedding takes, `[B, T, H_t]`.
    """
    states: dict[int, Tensor] = {}
    hidden: list[Tensor] = []
    blocks, decoder = decoder_layers(target), target.get_decoder()

    def keep_input(index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[index] = args[0] if args else kwargs["hidden_states"]  # [B, T, H_t]

        return hook

    def keep_output(_: nn.Module, __: Any, output: Any) -> None:
        states[len(blocks)] = output.last_hidden_state  # [B, T, H_t]

    def keep_hidden(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden.append(args[0])
        return (args[0][:, -1:],)  # logits are computed later, in pieces

    hooks = [
        blocks[index].register_forward_pre_hook(keep_input(index), with_kwargs=True)
        if index < len(blocks)
        else decoder.register_forward_hook(keep_output)
        for index in dict.fromkeys(layers)
    ]
    hooks.append(target.get_output_embeddings().register_forward_pre_hook(keep_hidden))
    try:
        target(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    features = [states[index] for index in layers] or [hidden[0][..., :0]]
    return torch.cat(features, dim=-1), hidden[0]
