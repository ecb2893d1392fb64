"""A language model of a known family on a CPU with its decoder layers in one C++ call, for few tokens.

It saves the Python of transformers' modules: a third of the time of a draft of a small model.
"""

import functools
from typing import Any, Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import cpu_layers
from .fused_layers import DecoderLayer, layer_of
from .known_code import code_of, code_of_reference, has_its_forward
from .snapshot import patched_forward


_CAPPED = ("gemma2.Gemma2ForCausalLM",)
_HEADS = ("llama.LlamaForCausalLM", *_CAPPED)
_BY_TYPE = ("gemma3.Gemma3TextModel",)
_DECODERS = ("llama.LlamaModel", "mistral.MistralModel", "qwen2.Qwen2Model", "gemma.GemmaModel", "gemma2.Gemma2Model",
             *_BY_TYPE)  # fmt: skip
"""Classes of transformers whose forwards are known; others, with the same code, are served too. Some cap logits, and
some have angles by type of layer."""


class WholeNetwork:
    """Computes what `network`, a shadow that :meth:`of` takes, computes.

    Its embedding, rotary embedding, last norm and head run as modules.
    """

    def __init__(self, network: Any) -> None:
        self._network, self._decoder = network, network.get_decoder()
        self._layers = list(self._decoder.layers)[: self._decoder.config.num_hidden_layers]
        self._types = getattr(self._decoder.config, "layer_types", None) or [""] * len(self._layers)
        config = network.config
        self._cap = config.final_logit_softcapping if code_of(type(network)) in _codes(_CAPPED) else None
        self._has_angles_by_type = code_of(type(self._decoder)) in _codes(_BY_TYPE)
        parts = [layer.parts() for layer in self._layers]
        self._takes_wide_angles = all(getattr(layer.self_attn, "_rounds_back", False) for layer in self._layers)
        dropouts = [getattr(layer, name) for layer in self._layers for name in layer._dropouts]
        self._call = cpu_layers.OneCall(self._layers, parts, [network, self._decoder, *self._layers, *dropouts])

    @classmethod
    def of(cls, network: PreTrainedModel) -> Optional["WholeNetwork"]:
        """None if the forward of `network` is not known."""
        decoder: Any = network.get_decoder()
        parts = [(network, _HEADS), (decoder, _DECODERS)]
        if decoder is network or not all(_is_known(part, names) for part, names in parts):
            return None
        if not all(isinstance(layer, DecoderLayer) and layer._kernels is cpu_layers for layer in decoder.layers):
            return None
        return cls(network)

    def __call__(
        self, tokens: Tensor, position_ids: Tensor, masks: Any, cache: Any, logits_to_keep: int
    ) -> Tensor | None:
        """Logits `[B, q, vocab]`, or of the last `logits_to_keep` tokens, if not 0; None if the modules must run: for
        many tokens, or with hooks that watch them.

        Args:
            tokens, position_ids: `[B, q]` int64.
            masks: spans, `[B, 1, q, 2 to 4]` int64; or a dict of these by type of layer.
            cache: which the forward writes to.
        """
        if tokens.numel() > cpu_layers.MOST_TOKENS:
            return None
        decoder = self._decoder
        spans = [masks[kind] if isinstance(masks, dict) else masks for kind in self._types]
        hidden = decoder.embed_tokens(tokens)  # [B, q, hidden]
        kinds = [(kind,) for kind in self._types] if self._has_angles_by_type else [()] * len(self._types)
        by_kind = {kind: decoder.rotary_emb(hidden, position_ids, *kind) for kind in set(kinds)}
        cosine = by_kind[kinds[0]][0]  # [B, q, 2 * half]
        fits = cosine.dtype == hidden.dtype or (self._takes_wide_angles and cosine.dtype == torch.float32)
        if not cpu_layers.serves(hidden) or not fits:
            return None
        caches = [layer_of(cache, index) for index in self._call.indices]
        hidden = self._call(hidden, [by_kind[kind] for kind in kinds], spans, caches)
        if hidden is None:
            return None
        logits: Tensor = self._network.lm_head(decoder.norm(hidden)[:, -logits_to_keep:])
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


def _is_known(module: Any, names: tuple[str, ...]) -> bool:
    kind: Any = type(module)
    is_of_transformers = kind.__module__.startswith("transformers.models.")
    known = is_of_transformers and code_of(kind) in _codes(names) and has_its_forward(kind)
    return known and patched_forward(module) is None


@functools.cache
def _codes(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(code_of_reference, names)) - {""}
