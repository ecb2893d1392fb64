"""Parts of the slow implementations of EAGLE-3 and DFlash: one vector at a time, nothing shared with the package.

Rotary frequencies come from transformers, which decides what they are.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


def rotary(layer: dict[str, Any], head_dim: int) -> tuple[list[float], float]:
    """Radians per position of each pair of dimensions, and the factor on cosine and sine."""
    given = {"rope_theta": 10000.0} | {key: layer[key] for key in ROPE_KEYS if key in layer}
    embedding = LlamaRotaryEmbedding(AutoConfig.for_model("llama", head_dim=head_dim, **given))
    return embedding.inv_freq.double().tolist(), embedding.attention_scaling


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def turned(x: Tensor, position: int, frequencies: list[float], scale: float) -> Tensor:
    """One head's vector `[d]` at a position."""
    half, result = len(x) // 2, torch.empty_like(x)
    for i, frequency in enumerate(frequencies):
        at = complex(x[i], x[half + i]) * complex(math.cos(position * frequency), math.sin(position * frequency))
        result[i], result[half + i] = at.real * scale, at.imag * scale
    return result


def attend(queries: list[Tensor], keys: list[list[Tensor]], values: list[Tensor]) -> Tensor:
    """Attention of one position, head by head: `[heads * d]` of `heads` queries `[d]`, over positions of `kv` keys
    `[d]` and values `[kv, d]` each."""
    found = []
    for head, query in enumerate(queries):
        group = head // (len(queries) // len(keys[0]))
        weights = torch.stack([query @ key[group] / len(query) ** 0.5 for key in keys]).softmax(0)
        found.append(sum(weight * value[group] for weight, value in zip(weights, values, strict=True)))
    return torch.cat(found)
