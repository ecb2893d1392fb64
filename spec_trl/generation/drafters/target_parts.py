"""Finds the target's embedding, head and vocabulary for learned drafters, under any wrapper."""

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..engine.network.shadow import share_weights


# Keys of configs for operations on logits after the head.
_FACTORS = {"logit_scale", "lm_head_multiplier"}  # Cohere, Falcon-H1
_DIVISORS = {"logits_scaling"}  # Granite
_SOFTCAPS = {"final_logit_softcapping"}  # Gemma 2 and later
# Keys about attention, routers and other heads.
_ELSEWHERE = re.compile(r"att(n|ention)_|router|num_logits_to_keep|output_auxiliary_logits|mlp_|_init_value")
_LOGITS = re.compile(r"logit|softcap|soft_cap|lm_head_multiplier")
_PADDED_TO = (64, 128, 256, 512)
"""Multiples of padded vocabularies. Not 1024: with it Mistral's 32,768 would pass for Llama's 32,000."""


def plain_embedding(target: PreTrainedModel) -> nn.Module:
    """The input embedding of `target`, on its live weights and in eval mode: plain rows `[..., H_t]` of tokens
    `[...]`, without the scaling of some families (Gemma)."""
    table: nn.Module = share_weights(target.get_input_embeddings())
    for module in table.modules():
        if isinstance(module, nn.Embedding) and type(module).__module__.startswith("transformers"):
            module.__class__ = nn.Embedding
            module._buffers = {}  # a new dict: that of the target does not change
            module.__dict__.pop("embed_scale", None)
    return table


def in_dtype_of(head: nn.Module, states: Tensor) -> Tensor:
    """Casts `states` to the dtype of the weight of `head`, unless quantized."""
    weight = next(head.parameters(), states)
    return states.to(weight.dtype) if weight.is_floating_point() else states


def logit_changes(target: PreTrainedModel) -> tuple[float, float | None]:
    """The factor and the softcap, if any, that `target` applies to the scores of its head.

    Raises:
        ValueError: its config has an unknown key about logits.
    """
    factor, softcap = 1.0, None
    for name, value in target.config.get_text_config(decoder=True).to_dict().items():
        if value is None or isinstance(value, bool) or not _LOGITS.search(name) or _ELSEWHERE.search(name):
            continue
        if name in _FACTORS:
            factor *= value
        elif name in _DIVISORS:
            factor /= value
        elif name in _SOFTCAPS:
            softcap = value
        else:
            raise ValueError(
                f"the config of {type(target).__name__} has {name}={value!r}, which may change its logits and is "
                "not known here; a drafter cannot be trained on this family."
            )
    return factor, softcap


def changed(scores: Tensor, factor: float, softcap: float | None) -> Tensor:
    """Logits `[..., V]` of a head's `scores` `[..., V]`."""
    logits = scores * factor
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def is_padded(size: int, other: int) -> bool:
    """Whether two sizes are equal, or one pads the other for the hardware: Qwen2.5 has 151,936 rows up to 3 B and
    152,064 beyond."""
    low, high = sorted((size, other))
    return low == high or any(-(-low // multiple) * multiple == high for multiple in _PADDED_TO)


def check_sizes(argument: str, size: int, wanted: int) -> None:
    """Raises ValueError, naming the drafter's `argument`, unless a vocabulary of `size` tokens and the target's
    `wanted` tokens can belong to one tokenizer."""
    if not is_padded(size, wanted):
        raise ValueError(
            f"{argument} has a vocabulary of {size} tokens and the target one of {wanted}; a drafter must use the "
            "target's tokenizer, and padding to a multiple of 64, 128, 256 or 512 does not explain the difference. "
            'Choose a drafter of the same family, or assistant_strategy="self".'
        )
