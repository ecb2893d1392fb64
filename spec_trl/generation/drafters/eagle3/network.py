"""The EAGLE-3 draft network (Li et al. 2025, arXiv 2503.01840)."""

from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from ..feature_network import Attention, FeatureNetwork, Rotation, Store
from .config import Eagle3Config


class Eagle3Network(FeatureNetwork):
    """One decoder layer over pairs of a token and the target's features at the token before it, projected: r.

    It predicts the token after the pair's. Where the target has not been yet, the layer's own output takes the place
    of r (`fed_back`). :class:`~spec_trl.generation.drafters.eagle3.drafter.Eagle3Drafter` shows the pairs.

    Parameters have the names of the speculators format, in which `midlayer` is `layers.0`. Arguments are those of
    :class:`FeatureNetwork`, which takes the layers too.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, feature_width: int, tensors: Collection[str]) -> None:
        super().__init__(config, feature_width, [_Layer(config)], {*tensors, "lm_head.weight"})
        count, eps = len(config.feature_layers), config.decoder.rms_norm_eps
        self.input_norm = nn.RMSNorm(feature_width, eps) if config.norm_before_fc else None
        norms = (nn.RMSNorm(feature_width // count, eps) for _ in range(count))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None

    def project(self, features: Tensor) -> Tensor:
        """r `[..., H]` of the target's features `[..., feature_width]`."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)  # of [..., H_t] each
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, mask: Tensor, store: Store) -> Tensor:
        """The layer's output h `[B, q, H]`, before the final norm.

        Args:
            embedded: `[B, q, H]` embeddings of the pairs' tokens.
            states: `[B, q, H]` r, or what is fed back in its place.
            positions: `[B, q]` int64; only differences between them matter.
            mask: additive `[B, 1, q, columns]`.
            store: K/V of this forward and earlier ones.
        """
        layer = cast(_Layer, self.layers[0])
        return layer(embedded, states, self.rotary(positions, embedded.dtype), mask, store)

    def fed_back(self, h: Tensor) -> Tensor:
        """What takes the place of r in the next pair, `[..., H]`."""
        return self.norm(h) if self.config.norm_output else h

    def logits(self, h: Tensor) -> Tensor:
        """Scores `[..., draft vocabulary]` of h `[..., H]`."""
        assert self.lm_head is not None
        return self._of_target(self.lm_head(self.norm(h)))


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        decoder = config.decoder
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(decoder, 2 * hidden, 0, has_norms=decoder.model_type == "qwen3")
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = LlamaMLP(decoder)

    def forward(self, embedded: Tensor, states: Tensor, rotation: Rotation, mask: Tensor, store: Store) -> Tensor:
        normed = self.hidden_norm(states)  # [B, q, H]
        pairs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [B, q, 2H]
        residual = normed if self.norm_before_residual else states
        h = residual + self.self_attn(pairs, rotation, mask, store)  # [B, q, H]
        return h + self.mlp(self.post_attention_layernorm(h))
