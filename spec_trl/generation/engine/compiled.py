"""Compiled forwards. On a GPU: decoder layers through torch.compile, one compilation for all layers of a network. On a
CPU: attention in C++."""

from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import cpu_attention
from .attention import calls_attention
from .cache import RaggedCache
from .runner import EagerRunner
from .shadow import decoder_layers, make_shadow


class CompiledRunner(EagerRunner):
    """An :class:`EagerRunner` on a CPU with compiled attention (`cpu_attention.py`), whatever the forward is for, and
    compiled parts of layers (`cpu_layer.py`)."""

    def for_drafter(self, network: PreTrainedModel, shares_cache: bool, made_of: tuple[object, ...]) -> EagerRunner:
        return cpu_runner(network, self._cache_for(network, shares_cache))

    def _run(self, tokens: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
        with torch.inference_mode():
            logits, features = super()._run(tokens, *given, **more | {"spans": True})
        # Copies: drafters learn from these, and from what inference mode makes nobody can.
        return logits.clone(), None if features is None else features.clone()


def cpu_runner(network: PreTrainedModel, cache: RaggedCache) -> EagerRunner:
    """A runner with compiled attention where that serves `network`, else an eager one."""
    is_served = cpu_attention.runs(network.device, network.dtype) and calls_attention(network)
    return (CompiledRunner if is_served else EagerRunner)(network, cache)


class _LayerCache:
    """The cache as one layer sees it.

    `RaggedCache.update` finds its layer by an index, for each of which torch.compile would compile the layer anew.
    Here every layer gets an object of the same shape, and the index is never looked at.
    """

    def __init__(self, cache: RaggedCache, index: int) -> None:
        self.layer = cache.layers[index]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.layer.update(key_states, value_states)

    def layer_at(self, _index: int) -> Any:
        return self.layer


def compiled_twin(network: PreTrainedModel, cache: RaggedCache) -> PreTrainedModel:
    """A twin of `network`, a shadow or its quantized twin, over the same weights, whose decoder layers are compiled.

    Layer by layer rather than whole: that takes seconds and not minutes, since layers of one class, shape and layer
    type share what is compiled. Embedding, final norm and head stay eager, and so does whatever is patched onto them.
    `cache` is that of its forwards, of which one has run. A network without a list of decoder layers is a ValueError.
    """
    twin = make_shadow(network)
    layers = decoder_layers(twin)
    # A code object of its own: recompilations are counted, and limited, per code object.
    code = _run_layer.__code__.replace(co_name=f"run_{type(layers[0]).__name__}")
    compiled = torch.compile(FunctionType(code, _run_layer.__globals__), fullgraph=True)
    for index, layer in enumerate(layers):
        layer.forward = partial(_forward, compiled, layer, _LayerCache(cache, index))
    return twin


def _run_layer(layer: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _forward(compiled: Any, layer: nn.Module, cache: _LayerCache, /, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: cache if isinstance(value, RaggedCache) else value for name, value in kwargs.items()}
    return compiled(layer, *args, **kwargs)
