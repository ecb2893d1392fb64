"""The DFlash draft network (arXiv 2602.06036): a whole block of tokens from one forward over the target's features.

The block is the last committed token, the anchor, and masks behind it. Its queries see each other and the context:
the target's hidden states at every position before the anchor, fused once and projected to K/V by every layer.

    context  c0 c1 ... c(a-1) | block  x_a  M  M  M      a: the anchor's position; the target has not read x_a yet
    drafts                             .    d1 d2 d3     slot k is token a + k
    sample_from_anchor                 d1   d2 d3 d4     slot k is token a + k + 1
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ...engine.attention import ragged_attention
from .config import DFlashConfig


Store = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's index and new keys and values `[B, kv_heads, n, d]`; returns all that the queries may look at."""
Rotation = tuple[Tensor, Tensor]


class DFlashNetwork(nn.Module):
    """The network itself; parameters have the names of the checkpoints.

    Args:
        config: of the checkpoint.
        feature_width: of the target's features at one position, all listed layers side by side.
        has_embedding: whether it has token embeddings of its own.
        has_head: whether it has an output head of its own.
        dtype: of its parameters.
        device: where they are; "meta" before a checkpoint is loaded.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: DFlashConfig,
        feature_width: int,
        has_embedding: bool = False,
        has_head: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        width, vocabulary = decoder.hidden_size, decoder.vocab_size
        self.fc = nn.Linear(feature_width, width, bias=False, **where)
        self.hidden_norm = RMSNorm(width, decoder.rms_norm_eps, where)
        self.layers = nn.ModuleList(DecoderLayer(decoder, where) for _ in range(decoder.num_hidden_layers))
        self.norm = RMSNorm(width, decoder.rms_norm_eps, where)
        self.embed_tokens = nn.Embedding(vocabulary, width, **where) if has_embedding else None
        self.lm_head = nn.Linear(width, config.draft_vocabulary, bias=False, **where) if has_head else None
        if config.is_pruned:
            count = config.draft_vocabulary
            self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64, device=device))  # [draft vocabulary]
            self.register_buffer("t2d", torch.zeros(vocabulary, dtype=torch.bool, device=device))  # [vocabulary]
        kind = decoder.rope_parameters["rope_type"]
        make = Qwen3RotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
        # No buffer: `.to(bfloat16)` must not touch the frequencies.
        self._frequencies, self._rotation_scale = make(decoder, device=torch.device("cpu"))  # [d / 2]

    def forward(self, features: Tensor, context_positions: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Block states from whole contexts, without a cache: what the cached and the batched forms are checked with.

        Args:
            features: `[B, C, feature width]` of the target. Those at or behind a row's anchor are not seen.
            context_positions: `[B, C]` int64.
            embedded: `[B, block_size, hidden]` embeddings of anchor and masks.
            anchors: `[B]` int64 positions.

        Returns:
            `[B, block_size, hidden]`, what the head takes.
        """
        slots = anchors[:, None] + torch.arange(embedded.shape[1], device=anchors.device)  # [B, n]
        keys = torch.cat([context_positions, slots], dim=1)  # [B, C + n]
        is_block = torch.arange(keys.shape[1], device=keys.device).expand_as(keys) >= context_positions.shape[1]
        masks = self.config.masks(anchors, keys, is_block, embedded.dtype)
        context: list[tuple[Tensor, Tensor]] = []

        def keep(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            context.append((keys, values))
            return keys, values

        def join(index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            old_keys, old_values = context[index]
            return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)  # [B, kv, C + n, d]

        self.remember(features, context_positions, keep)
        return self.refine(embedded, slots, masks, join)

    def remember(self, features: Tensor, positions: Tensor, store: Store) -> None:
        """Hands the context K/V of `features` `[B, q, feature width]` at `positions` `[B, q]` to `store`."""
        context = self.hidden_norm(self.fc(features))  # [B, q, hidden]
        rotation = self._rotation(positions, context.dtype)
        for index, layer in enumerate(cast("list[DecoderLayer]", self.layers)):
            store(index, *layer.self_attn.keys_values(context, rotation))

    def refine(self, embedded: Tensor, positions: Tensor, masks: Sequence[Tensor], store: Store) -> Tensor:
        """Block states `[B, n, hidden]` from embeddings `[B, n, hidden]` at `positions` `[B, n]`.

        Args:
            embedded: anchor and masks.
            positions: int64.
            masks: additive, one per layer, over what `store` returns.
            store: takes the block's K/V and returns it with the context's.
        """
        hidden, rotation = embedded, self._rotation(positions, embedded.dtype)
        for index, layer in enumerate(cast("list[DecoderLayer]", self.layers)):
            normed = layer.input_layernorm(hidden)  # [B, n, hidden]
            keys, values = store(index, *layer.self_attn.keys_values(normed, rotation))
            hidden = hidden + layer.self_attn(normed, rotation, keys, values, masks[index])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        states: Tensor = self.norm(hidden)  # [B, n, hidden]
        return states

    def embed(self, tokens: Tensor, target: nn.Module) -> Tensor:
        """Embeddings `[B, n, hidden]` of `tokens` `[B, n]`: its own, or those of the `target`'s embedding module.

        Rows of the table as they are: both references leave out what a family does to them afterwards (Gemma).
        """
        table = (target if self.embed_tokens is None else self.embed_tokens).get_parameter("weight")
        return F.embedding(tokens, table).to(self.fc.weight.dtype) * self.config.embedding_scale

    def logits(self, states: Tensor, target: nn.Module) -> Tensor:
        """Scores `[..., draft vocabulary]` of block states by its own head, or by the `target`'s."""
        head = target if self.lm_head is None else self.lm_head
        logits = head(states.to(head.get_parameter("weight").dtype)) * self.config.output_multiplier
        if self.config.softcap is not None:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return logits

    @property
    def target_ids(self) -> Tensor:
        """`[draft vocabulary]` int64 token of each entry of a pruned vocabulary; `d2t` holds offsets."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin `[B, 1, n, d]` at `positions` `[B, n]`, computed for these: there is no table to end."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        angles = positions[:, None, :, None].to(wide) * self._frequencies.to(wide)  # [B, 1, n, d / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [B, 1, n, d]
        scale = self._rotation_scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class RMSNorm(nn.Module):
    """Root mean square norm, at least in float32, over the last dimension."""

    def __init__(self, width: int, eps: float, where: Mapping[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, **where))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class DecoderLayer(nn.Module):
    """One layer's modules; :meth:`DFlashNetwork.refine` runs them."""

    def __init__(self, decoder: PreTrainedConfig, where: Mapping[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(decoder, where)
        self.mlp = GatedMLP(decoder, where)
        self.input_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, where)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, where)


class Attention(nn.Module):
    """Attention of a block over context and block; K/V come from either by the same projections."""

    def __init__(self, decoder: PreTrainedConfig, where: Mapping[str, Any]) -> None:
        super().__init__()
        width, self.head_dim, bias = decoder.hidden_size, decoder.head_dim, decoder.attention_bias
        queries, shared = decoder.num_attention_heads * self.head_dim, decoder.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias, **where)
        self.k_proj = nn.Linear(width, shared, bias=bias, **where)
        self.v_proj = nn.Linear(width, shared, bias=bias, **where)
        self.o_proj = nn.Linear(queries, width, bias=bias, **where)
        self.q_norm = RMSNorm(self.head_dim, decoder.rms_norm_eps, where)
        self.k_norm = RMSNorm(self.head_dim, decoder.rms_norm_eps, where)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, kv_heads, n, d]` of inputs `[B, n, hidden]`."""
        keys = self.k_norm(self._split(self.k_proj(x))).transpose(1, 2)  # [B, kv, n, d]
        return _rotate(keys, rotation), self._split(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """`[B, n, hidden]` from `x` `[B, n, hidden]` over `[B, kv_heads, K, d]` keys and values."""
        queries = _rotate(self.q_norm(self._split(self.q_proj(x))).transpose(1, 2), rotation)  # [B, heads, n, d]
        attended, _ = ragged_attention(self, queries, keys, values, mask)  # [B, n, heads, d]
        return self.o_proj(attended.flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, n, heads, d]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, decoder: PreTrainedConfig, where: Mapping[str, Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(decoder.hidden_size, decoder.intermediate_size, bias=False, **where)
        self.up_proj = nn.Linear(decoder.hidden_size, decoder.intermediate_size, bias=False, **where)
        self.down_proj = nn.Linear(decoder.intermediate_size, decoder.hidden_size, bias=False, **where)
        self.activation = ACT2FN[decoder.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin  # [B, heads, n, d]
