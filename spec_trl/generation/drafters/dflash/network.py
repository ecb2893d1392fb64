"""The DFlash draft network (arXiv 2602.06036): a whole block of tokens from one forward over the target's features.

The block is the last committed token, the anchor, and masks after it. Its queries see each other and the context:
the target's hidden states at every position before the anchor, fused once and projected to K/V by every layer.

    context  c0 c1 ... c(a-1) | block  x_a  M  M  M      a: the anchor's position; the target has not read x_a yet
    drafts                             .    d1 d2 d3     slot k is token a + k
    sample_from_anchor                 d1   d2 d3 d4     slot k is token a + k + 1
"""

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ..borrowed import in_dtype_of
from ..feature_network import Attention, FeatureNetwork, Store
from .config import DFlashConfig


class DFlashNetwork(FeatureNetwork):
    """The network itself; arguments as of :class:`FeatureNetwork`, which takes the layers too."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, feature_width: int, tensors: Collection[str] = ()) -> None:
        decoder = config.decoder
        layers = [_Layer(decoder, index) for index in range(decoder.num_hidden_layers)]
        super().__init__(config, feature_width, layers, tensors)
        self.hidden_norm = nn.RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)

    def remember(self, features: Tensor, positions: Tensor, store: Store) -> None:
        """Hands the context K/V of `features` `[B, q, feature_width]` at `positions` `[B, q]` to `store`."""
        context = self.hidden_norm(self.fc(features))  # [B, q, hidden]
        rotation = self.rotary(positions, context.dtype)
        for layer in self.layers:
            cast(_Layer, layer).self_attn.remember(context, rotation, store)

    def refine(self, embedded: Tensor, positions: Tensor, masks: Sequence[Tensor], store: Store) -> Tensor:
        """Block states `[B, n, hidden]` from embeddings `[B, n, hidden]` at `positions` `[B, n]` int64, with one
        additive mask per layer over what `store` returns: the K/V of context and block."""
        hidden, rotation = embedded, self.rotary(positions, embedded.dtype)
        for layer, mask in zip(self.layers, masks, strict=True):
            layer = cast(_Layer, layer)
            hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), rotation, mask, store)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        states: Tensor = self.norm(hidden)  # [B, n, hidden]
        return states

    def embed(self, tokens: Tensor, target: nn.Module) -> Tensor:
        return super().embed(tokens, target) * self.config.embedding_scale

    def logits(self, states: Tensor, target: nn.Module) -> Tensor:
        """Scores `[..., draft vocabulary]` of block states by its own head, or by the `target`'s."""
        head = target if self.lm_head is None else self.lm_head
        logits = head(in_dtype_of(head, states)) * self.config.output_multiplier
        if self.config.softcap is not None:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return self._of_target(logits)


class _Layer(nn.Module):
    """One layer's modules; :meth:`DFlashNetwork.refine` runs them."""

    def __init__(self, decoder: PreTrainedConfig, index: int) -> None:
        super().__init__()
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.self_attn = Attention(decoder, hidden, index, has_norms=True)
        self.mlp = LlamaMLP(decoder)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
