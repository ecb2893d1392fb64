"""What the slow implementations of EAGLE-3 and DFlash share: one position and one head at a time, no cache, nothing of
the package. Rotary frequencies come from transformers, which decides what they are."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


class StraightLine:
    """The parts of a decoder layer.

    Args:
        sizes: of the decoder, as in its config.json.
        tensors: its weights by name.
    """

    def __init__(self, sizes: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.sizes, self.tensors = sizes, tensors
        self.d = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
        given = {"rope_theta": 10000.0} | {key: sizes[key] for key in ROPE_KEYS if key in sizes}
        self.rotary = LlamaRotaryEmbedding(AutoConfig.for_model("llama", head_dim=self.d, **given))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.sizes["rms_norm_eps"]).sqrt() * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = self.tensors[f"{name}.weight"] @ x
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def turned(self, x: Tensor, layer: str, name: str, position: int) -> list[Tensor]:
        """Each head's query or key `[d]` at a position."""
        found = []
        for head in self.linear(x, f"{layer}.self_attn.{name}_proj").view(-1, self.d):
            if f"{layer}.self_attn.{name}_norm.weight" in self.tensors:
                head = self.norm(head, f"{layer}.self_attn.{name}_norm")
            angles = position * self.rotary.inv_freq.double()  # [d / 2]
            turn = torch.polar(torch.full_like(angles, self.rotary.attention_scaling), angles)  # [d / 2]
            pairs = torch.complex(*head.chunk(2)) * turn  # [d / 2]
            found.append(torch.cat([pairs.real, pairs.imag]))
        return found

    def values(self, x: Tensor, layer: str) -> Tensor:
        """`[kv, d]`"""
        return self.linear(x, f"{layer}.self_attn.v_proj").view(-1, self.d)

    def attend(self, queries: list[Tensor], keys: list[list[Tensor]], values: list[Tensor], layer: str) -> Tensor:
        """Attention `[H]` of one position's queries over the keys and values `[kv, d]` of the positions it sees."""
        found = []
        for head, query in enumerate(queries):
            group = head // (len(queries) // len(keys[0]))
            weights = torch.stack([query @ key[group] / self.d**0.5 for key in keys]).softmax(0)  # [positions]
            found.append(weights @ torch.stack([value[group] for value in values]))
        return self.linear(torch.cat(found), f"{layer}.self_attn.o_proj")

    def mlp(self, h: Tensor, layer: str) -> Tensor:
        x = self.norm(h, f"{layer}.post_attention_layernorm")
        gated = F.silu(self.linear(x, f"{layer}.mlp.gate_proj")) * self.linear(x, f"{layer}.mlp.up_proj")
        return h + self.linear(gated, f"{layer}.mlp.down_proj")

    def over_target_vocabulary(self, logits: Tensor, vocabulary: int) -> Tensor:
        """`[vocabulary]` of the draft vocabulary's logits: -inf for tokens that it lacks."""
        ids = torch.arange(len(logits)) + self.tensors.get("d2t", 0)
        return torch.full((vocabulary,), -torch.inf, dtype=logits.dtype).index_copy_(0, ids, logits)


def draw_vocabulary(draft: int, vocabulary: int, generator: torch.Generator) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a random draft vocabulary; nothing where it is the whole one."""
    if draft == vocabulary:
        return {}
    ids = torch.randperm(vocabulary, generator=generator)[:draft].sort().values  # [draft]
    is_drafted = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)  # [V]
    return {"d2t": ids - torch.arange(draft), "t2d": is_drafted}
