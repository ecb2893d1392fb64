"""Forwards with C++ on a CPU: attention, layers, networks, and prompts without padding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....native.native_code import compiler
from ..kv.base import KVCache
from ..kv.cache import RaggedCache
from ..network.attention import calls_attention
from ..network.cpu_layers import SCALARS, attention_failed
from ..network.whole_network import whole
from .runner import EagerRunner


class CompiledRunner(EagerRunner):
    """An :class:`EagerRunner` on a CPU with C++ attention in every forward, and C++ parts of layers, or whole ones."""

    def __init__(self, network: PreTrainedModel, cache: KVCache) -> None:
        super().__init__(network, cache)
        self._whole = whole(network)

    def for_drafter(self, network: PreTrainedModel, shares_cache: bool, made_of: tuple[object, ...]) -> EagerRunner:
        return cpu_runner(network, self._cache_for(network, shares_cache))

    def _run(self, tokens: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        with torch.inference_mode():
            logits, features = super()._run(tokens, *arguments, **keywords | {"spans": True})
        # Copies, since drafters learn from them, and inference tensors take no part in autograd.
        return logits.clone(), None if features is None else features.clone()

    def _without_padding(self, tokens: Tensor, fed: Sequence[int] | None) -> Tensor | None:
        plain = type(self.cache) is RaggedCache and self.cache.offsets is None and self.cache.key_positions is None
        # Spans of a GPU have no rows, and a mask for all rows would be large.
        if not plain or self.uses_spans or attention_failed() or fed is None or min(fed) == tokens.shape[1]:
            return None
        return torch.arange(tokens.shape[1]) < torch.tensor(fed)[:, None]  # [B, q]

    def _logits(self, tokens: Tensor, position_ids: Tensor, masks: Any, logits_to_keep: int) -> Tensor:
        logits = None
        if self._whole is not None:
            logits = self._whole(tokens, position_ids, masks, self.cache, logits_to_keep)
        return super()._logits(tokens, position_ids, masks, logits_to_keep) if logits is None else logits


def cpu_runner(network: PreTrainedModel, cache: KVCache) -> EagerRunner:
    """Makes a runner with C++ attention if that serves `network`, else an eager one."""
    has_attention = network.device.type == "cpu" and network.dtype in SCALARS and compiler() is not None
    return (CompiledRunner if has_attention and calls_attention(network) else EagerRunner)(network, cache)
