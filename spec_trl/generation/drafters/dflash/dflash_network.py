"""Computes a block of tokens in one forward over the target's features (arXiv 2602.06036).

The block is the last committed token, the anchor, and masks after it. Its queries see each other and the context:
the target's hidden states at every position before the anchor, fused once and projected to K/V by every layer.

    context  c0 c1 ... c(a-1) | block  x_a  M  M  M      a: the anchor's position; the target has not read x_a yet
    drafts                             .    d1 d2 d3     slot k is token a + k
    sample_from_anchor                 d1   d2 d3 d4     slot k is token a + k + 1

A checkpoint's config.json is of the z-lab or the speculators format.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ...engine.network.attention import SLIDING, as_spans
from ..feature_network import (
    DECODER_KEYS,
    Attention,
    FeatureConfig,
    FeatureNetwork,
    Rotary,
    Store,
    check_keys,
    integer,
    layer_list,
    read_decoder,
)
from ..target_parts import changed, in_dtype_of


_ZLAB_EITHER = {  # at the top, or in dflash_config
    "block_size", "final_logit_softcapping", "input_embedding_scale", "mask_token_id", "output_multiplier",
    "target_layer_ids",
}  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False, None),
    "projector_type": ("dflash", None),
    "shift_label": (False, None),
    "use_aux_hidden_state": (True, None),
}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(FeatureConfig):
    """A DFlash checkpoint's config.json.

    Args:
        block_size: number of slots of a block, the anchor included.
        mask_token: the token in the slots after the anchor.
        is_causal: by layer, whether a slot sees only earlier slots.
        sample_from_anchor: whether the anchor's slot drafts too, and a slot drafts the token after its position.
        window_from_anchor: whether windowed layers reach back from the anchor (speculators), or from every slot
        (z-lab).
        num_target_layers: layers of its target; None: unknown.
        embedding_scale: factor on the token embeddings.
        output_multiplier: factor on the logits.
        softcap: of the logits, after the factor; None: none.
    """

    block_size: int
    mask_token: int
    is_causal: tuple[bool, ...]
    sample_from_anchor: bool = False
    window_from_anchor: bool = False
    num_target_layers: int | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> "DFlashConfig":
        """Reads a config.json of the z-lab or the speculators format; raises ValueError for others, and for a
        missing key or one that asks for another network."""
        if "speculators_model_type" in settings:
            return cls._parse_speculators(settings)
        if "dflash_config" not in settings and "block_size" not in settings:
            missing = "neither dflash_config nor block_size nor speculators_model_type"
            raise ValueError(f"its config.json has {missing}: it is no DFlash drafter.")
        inner: Mapping[str, Any] = settings.get("dflash_config") or {}
        check_keys("dflash_config", inner, _ZLAB_EITHER, _FIXED)
        check_keys("config.json", settings, DECODER_KEYS | _ZLAB_EITHER, _FIXED)
        values = {key: inner.get(key, settings.get(key)) for key in _ZLAB_EITHER}
        decoder = read_decoder(settings, "qwen3", model_type="qwen3", mlp_bias=False)
        depth, ids = settings.get("num_target_layers"), values["target_layer_ids"]
        if ids is None:
            depth = integer("num_target_layers (target_layer_ids is missing)", depth, 4)
            ids = spaced_layers(depth, decoder.num_hidden_layers)
        causal = settings.get("is_causal")
        return cls(
            decoder=decoder,
            block_size=integer("block_size", values["block_size"], 2),
            mask_token=integer("mask_token_id", values["mask_token_id"], 0),
            # Counted from the first layer's output.
            feature_layers=tuple(index + 1 for index in layer_list("target_layer_ids", ids)),
            is_causal=tuple(kind == SLIDING if causal is None else bool(causal) for kind in decoder.layer_types),
            draft_vocabulary=decoder.vocab_size,
            num_target_layers=depth,
            embedding_scale=float(values["input_embedding_scale"] or 1.0),
            output_multiplier=float(values["output_multiplier"] or 1.0),
            softcap=values["final_logit_softcapping"] or None,
        )

    @classmethod
    def _parse_speculators(cls, settings: Mapping[str, Any]) -> "DFlashConfig":
        kind = settings["speculators_model_type"]
        if kind != "dflash":
            raise ValueError(f'speculators_model_type={kind!r} is not served here; it must be "dflash".')
        check_keys("config.json", settings, (), _FIXED)
        inner: Mapping[str, Any] = settings.get("transformer_layer_config") or {}
        check_keys("transformer_layer_config", inner, DECODER_KEYS, _FIXED)
        decoder = read_decoder(inner, "qwen3", mlp_bias=False)
        non_causal = bool(settings.get("sliding_window_non_causal", False))
        ids = settings.get("aux_hidden_state_layer_ids")
        return cls(
            decoder=decoder,
            block_size=integer("block_size", settings.get("block_size", 8), 2),
            mask_token=integer("mask_token_id", settings.get("mask_token_id"), 0),
            feature_layers=layer_list("aux_hidden_state_layer_ids", ids),
            is_causal=tuple(kind == SLIDING and not non_causal for kind in decoder.layer_types),
            draft_vocabulary=integer("draft_vocab_size", settings.get("draft_vocab_size", 32000), 1),
            sample_from_anchor=bool(settings.get("sample_from_anchor", False)),
            window_from_anchor=True,
            target_hidden_size=settings.get("target_hidden_size"),
        )

    def check_target(self, target: PreTrainedConfig, tensors: Collection[str]) -> None:
        super().check_target(target, tensors)
        if self.num_target_layers not in (None, target.num_hidden_layers):
            raise ValueError(
                f"num_target_layers={self.num_target_layers}, and the target has {target.num_hidden_layers} layers. "
                "Use a drafter that was made for this target."
            )
        rows = self.decoder.vocab_size if "embed_tokens.weight" in tensors else target.vocab_size
        if self.mask_token >= rows:
            raise ValueError(
                f"mask_token_id={self.mask_token} lies outside the embedding of {rows} tokens. Give the target the "
                "embedding that the drafter was trained with."
            )

    @property
    def drafts(self) -> int:
        """Number of tokens that one block drafts."""
        return self.block_size - (0 if self.sample_from_anchor else 1)

    def masks(self, anchors: Tensor, keys: Tensor, is_block: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Additive masks `[B, 1, block_size, K]` for the queries of a block, one per layer.

        Args:
            anchors: `[B]` int64 positions.
            keys: `[B or 1, K]` int64 position of every key, K: context and block.
            is_block: `[B, K]` bool, whether a key is of the block, not of the context.
            dtype: of the queries.
        """
        seen_context = is_block[:, None] | (keys < anchors[:, None])[:, None]  # [B, 1, K]

        def mask(first: Tensor, last: Tensor) -> Tensor:
            seen = seen_context & (keys[:, None] >= first[..., None]) & (keys[:, None] <= last[..., None])  # [B, n, K]
            additive = torch.zeros(seen.shape, dtype=dtype, device=seen.device)  # [B, n, K]
            return additive.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

        return self._of_each_layer(anchors, mask)

    def spans(self, anchors: Tensor, table: Tensor | None) -> list[Tensor]:
        """The same masks as first and last column that a query sees, made by :func:`~.as_spans`, with its `table`."""
        return self._of_each_layer(anchors, lambda first, last: as_spans(first, last, table))

    def _of_each_layer(self, anchors: Tensor, make: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """`make` of the first and the last position `[B, n]` that the queries of a block see, for each layer; alike
        layers share a result. A block follows its context, so these positions are contiguous."""
        anchor, window = anchors[:, None], self.decoder.sliding_window  # [B, 1]
        query = anchor + torch.arange(self.block_size, device=anchors.device)  # [B, n]
        made: dict[tuple[str, bool], Tensor] = {}
        kinds = list(zip(self.decoder.layer_types, self.is_causal, strict=True))
        for kind, is_causal in set(kinds):
            first, last = torch.zeros_like(query), query if is_causal else query[:, -1:].expand_as(query)
            if kind == SLIDING and self.window_from_anchor:
                first = (anchor - window).clamp(min=0).expand_as(query)
            elif kind == SLIDING:
                first, last = (query - window + 1).clamp(min=0), torch.minimum(last, query + window - 1)
            made[kind, is_causal] = make(first, last)
        return [made[kind] for kind in kinds]


def spaced_layers(depth: int, count: int) -> list[int]:
    """The reference's choice of `count` of a target's `depth` layers, its rounding (half to even) included."""
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


class DFlashNetwork(FeatureNetwork):
    """The network itself; arguments as of :class:`FeatureNetwork`, and the layers."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, feature_width: int, tensors: Collection[str] = ()) -> None:
        decoder = config.decoder
        layers = [_Layer(decoder, index) for index in range(decoder.num_hidden_layers)]
        super().__init__(config, feature_width, layers, tensors)
        self.rotary = Rotary(decoder)
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
        scores = head(in_dtype_of(head, states))
        return self._of_target(changed(scores, self.config.output_multiplier, self.config.softcap))


class _Layer(nn.Module):
    def __init__(self, decoder: PreTrainedConfig, index: int) -> None:
        super().__init__()
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.self_attn = Attention(decoder, hidden, index, has_norms=True)
        self.mlp = LlamaMLP(decoder)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
