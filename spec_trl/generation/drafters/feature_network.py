"""What the networks of EAGLE-3 and DFlash share: features, embedding, vocabulary, rotary positions and attention."""

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from ..engine.attention import ragged_attention
from .feature_config import FeatureConfig


Store = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Takes new keys and values `[B, kv_heads, n, d]` of a layer, by its index, and returns all that the queries may see.
`update` of transformers' caches is one."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, `[B, 1, n, d]` each."""


class FeatureNetwork(nn.Module):
    """A network that reads its target's features. Parameters have the names of the checkpoints.

    Args:
        config: what it computes.
        feature_width: of the target's features at one position, all its hidden states side by side.
        layers: its decoder layers.
        tensors: names in the checkpoint: embedding, head and vocabulary maps are made where they are among them.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: FeatureConfig, feature_width: int, layers: Iterable[nn.Module], tensors: Collection[str]
    ) -> None:
        super().__init__()
        self.config = config
        hidden, vocabulary = config.decoder.hidden_size, config.decoder.vocab_size
        self.fc = nn.Linear(feature_width, hidden, bias=False)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(hidden, config.decoder.rms_norm_eps)
        self.embed_tokens = nn.Embedding(vocabulary, hidden) if "embed_tokens.weight" in tensors else None
        has_head = "lm_head.weight" in tensors
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False) if has_head else None
        if "d2t" in tensors:
            self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.int64))
        if "t2d" in tensors:
            self.register_buffer("t2d", torch.zeros(vocabulary, dtype=torch.bool))
        self.rotary = Rotary(config.decoder)
        self._scored: Tensor | None = None  # places of the target's tokens among its own; None: all are

    @property
    def dtype(self) -> torch.dtype:
        """Of its parameters."""
        return self.fc.weight.dtype

    @torch.no_grad()
    def embed(self, tokens: Tensor, target: nn.Module) -> Tensor:
        """Embeddings `[B, n, hidden]` of `tokens` `[B, n]`, without gradients: its own, or those of the `target`
        (:func:`~spec_trl.generation.drafters.borrowed.plain_embedding`)."""
        if self.embed_tokens is not None:
            # The target's vocabulary may have more rows of padding.
            target, tokens = self.embed_tokens, tokens.clamp(max=self.embed_tokens.num_embeddings - 1)
        rows: Tensor = target(tokens)  # [B, n, hidden]
        return rows.to(self.dtype)

    def target_ids(self, rows: int) -> Tensor | None:
        """`[draft vocabulary]` int64: the target's token for each that the drafter scores; None: they are the same.

        From now on it scores no token beyond the `rows` of the target's vocabulary, which may have less padding than
        the one that the drafter was trained with.

        Raises:
            ValueError: d2t leads out of the vocabulary or twice to one token, or t2d marks other tokens.
        """
        maps, vocabulary = dict(self.named_buffers()), self.config.decoder.vocab_size
        ids = torch.arange(self.config.draft_vocabulary, device=self.fc.weight.device)  # [draft vocabulary]
        if "d2t" in maps:
            ids = ids + self.d2t
        elif "t2d" in maps:
            raise ValueError("it has t2d and no d2t. The checkpoint was not saved whole.")
        elif self.lm_head is None or vocabulary == rows:  # a borrowed head has the target's rows
            return None
        lowest, highest, count = int(ids.min()), int(ids.max()), ids.unique().numel()
        if lowest < 0 or highest >= vocabulary or count < len(ids):
            raise ValueError(
                f"d2t must lead each of the drafter's {len(ids)} tokens to another one of the target's {vocabulary}; "
                f"it leads to {count} different ones from {lowest} to {highest}."
            )
        if "t2d" in maps and not torch.equal(self.t2d.nonzero().flatten(), ids.sort().values):
            raise ValueError("t2d marks other tokens than d2t leads to. Take both from the same training run.")
        if highest >= rows:
            self._scored = (ids < rows).nonzero().flatten()
            ids = ids[self._scored]
        return ids

    def _of_target(self, logits: Tensor) -> Tensor:
        """`logits` `[..., draft vocabulary]` of the tokens that the target has."""
        return logits if self._scored is None else logits[..., self._scored]


class Rotary:
    """Rotary positions with transformers' frequencies. Not a module: a buffer would stay on the meta device while a
    checkpoint is loaded, and be cast with the weights."""

    def __init__(self, decoder: PreTrainedConfig) -> None:
        with torch.device("cpu"):
            embedding = LlamaRotaryEmbedding(decoder)
        self._frequencies: Tensor = embedding.inv_freq.detach()  # [d / 2]
        self._scale: float = embedding.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin in `dtype` at `positions` (`[B, n]` int64)."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        angles = positions[:, None, :, None].to(wide) * self._frequencies.to(wide)  # [B, 1, n, d / 2]
        angles = torch.cat([angles, angles], dim=-1)  # [B, 1, n, d]
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


class Attention(nn.Module):
    """Attention with grouped heads and rotary positions, over keys and values that a :data:`Store` keeps by `layer`.
    Projections read `inputs` numbers; with `has_norms` queries and keys are normed per head."""

    def __init__(self, decoder: PreTrainedConfig, inputs: int, layer: int, has_norms: bool) -> None:
        super().__init__()
        self.head_dim, self.layer, bias = decoder.head_dim, layer, decoder.attention_bias
        queries, shared = decoder.num_attention_heads * self.head_dim, decoder.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, shared, bias=bias)
        self.v_proj = nn.Linear(inputs, shared, bias=bias)
        self.o_proj = nn.Linear(queries, decoder.hidden_size, bias=bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, decoder.rms_norm_eps) if has_norms else nn.Identity() for _ in range(2)
        )

    def remember(self, x: Tensor, rotation: Rotation, store: Store) -> tuple[Tensor, Tensor]:
        """Hands `store` the keys and values of `x` `[B, n, inputs]`; returns what it returns."""
        keys = _rotated(self.k_norm(self._split(self.k_proj(x))), rotation)  # [B, kv_heads, n, d]
        return store(keys, self._split(self.v_proj(x)).transpose(1, 2), self.layer)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor, store: Store) -> Tensor:
        """`[B, n, hidden]` of `x` `[B, n, inputs]`, over what `store` returns; additive mask `[B, 1, n, columns]`."""
        keys, values = self.remember(x, rotation, store)  # [B, kv_heads, columns, d] each
        queries = _rotated(self.q_norm(self._split(self.q_proj(x))), rotation)  # [B, heads, n, d]
        attended, _ = ragged_attention(self, queries, keys, values, mask)  # [B, n, heads, d]
        return self.o_proj(attended.flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, n, heads, d]


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` `[B, n, heads, d]` as `[B, heads, n, d]`, rotated."""
    cos, sin = rotation
    x = x.transpose(1, 2)
    return x * cos + rotate_half(x) * sin
