"""A language model of a known family on a CPU with its decoder layers in one C++ call.

It saves the Python of transformers' modules: a third of the time of a draft of a small model.
"""

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import cpu_layers
from .fused_layers import DecoderLayer, layer_of
from .known_code import code_of, code_of_reference, has_its_forward
from .one_call import OneCall
from .snapshot import patched_forward


_CAPPED = ("gemma2.Gemma2ForCausalLM",)
_HEADS = ("llama.LlamaForCausalLM", *_CAPPED)
_BY_TYPE = ("gemma3.Gemma3TextModel",)
_DECODERS = ("llama.LlamaModel", "mistral.MistralModel", "qwen2.Qwen2Model", "gemma.GemmaModel", "gemma2.Gemma2Model",
             *_BY_TYPE)  # fmt: skip
"""Classes of transformers whose forwards are known; others, with the same code, are served too. Some cap logits, and
some have angles by type of layer."""


class WholeNetwork:
    """Computes what a network, a shadow that :func:`whole` takes, computes.

    Its embedding, rotary embedding, last norm and head run as modules. It does not reference the network.
    """

    def __init__(self, network: Any) -> None:
        self._decoder, self._head = network.get_decoder(), network.lm_head
        is_capped = code_of(type(network)) in _codes(_CAPPED)
        self._cap = network.config.final_logit_softcapping if is_capped else None
        self._has_angles_by_type = code_of(type(self._decoder)) in _codes(_BY_TYPE)
        layers = list(self._decoder.layers)[: self._decoder.config.num_hidden_layers]
        types = getattr(self._decoder.config, "layer_types", None) or [""] * len(layers)
        self._types, parts = types[: len(layers)], [layer.parts() for layer in layers]
        self._takes_wide_angles = all(getattr(layer.self_attn, "_rounds_back", False) for layer in layers)
        dropouts = [getattr(layer, name) for layer in layers for name in layer._dropouts]
        self._call = OneCall(layers, parts, [network, self._decoder, *layers, *dropouts])

    def __call__(
        self, tokens: Tensor, position_ids: Tensor, masks: Any, cache: Any, logits_to_keep: int
    ) -> Tensor | None:
        """Logits `[B, q, vocab]`, or of the last `logits_to_keep` tokens, if not 0; None if the modules must run: for
        prompts in float32, many tokens of a quantized copy, and with hooks that watch them.

        Args:
            tokens, position_ids: `[B, q]` int64.
            masks: spans, `[B, 1, q, 2 to 4]` int64; or a dict of these by type of layer.
            cache: which the forward writes to.
        """
        decoder = self._decoder
        if not self._call.may_run(decoder.embed_tokens.weight, tokens.numel()):
            return None
        spans = [masks[kind] if isinstance(masks, dict) else masks for kind in self._types]
        hidden = decoder.embed_tokens(tokens)  # [B, q, hidden]
        kinds = [(kind,) for kind in self._types] if self._has_angles_by_type else [()] * len(self._types)
        by_kind = {kind: decoder.rotary_emb(hidden, position_ids, *kind) for kind in set(kinds)}
        cosine = by_kind[kinds[0]][0]  # [B, q, 2 * half]
        if cosine.dtype != hidden.dtype and not (self._takes_wide_angles and cosine.dtype == torch.float32):
            return None
        caches = [layer_of(cache, index) for index in self._call.indices]
        hidden = self._call(hidden, [by_kind[kind] for kind in kinds], spans, caches)
        if hidden is None:
            return None
        logits: Tensor = self._head(decoder.norm(hidden)[:, -logits_to_keep:])
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


def whole(network: PreTrainedModel) -> WholeNetwork | None:
    """None if the forward of `network` is not known. Found once: another forward makes another shadow."""
    if network not in _found:
        _found[network] = _find(network)
    return _found[network]


_found: WeakKeyDictionary[nn.Module, WholeNetwork | None] = WeakKeyDictionary()


def _find(network: Any) -> WholeNetwork | None:
    decoder = network.get_decoder()
    parts = [(network, _HEADS), (decoder, _DECODERS)]
    if decoder is network or not all(_is_known(part, names) for part, names in parts):
        return None
    layers = decoder.layers
    fused = all(isinstance(layer, DecoderLayer) and layer._kernels is cpu_layers for layer in layers)
    return WholeNetwork(network) if fused else None


def _is_known(module: Any, names: tuple[str, ...]) -> bool:
    kind: Any = type(module)
    is_of_transformers = kind.__module__.startswith("transformers.models.")
    known = is_of_transformers and code_of(kind) in _codes(names) and has_its_forward(kind)
    return known and patched_forward(module) is None


@functools.cache
def _codes(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(map(code_of_reference, names)) - {""}
