"""Runs one network over a ragged cache. Every forward of generation, target's or drafter's, goes through here."""

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import MaskPlan
from .cache import RaggedCache
from .requirements import position_limit


# Attention reads columns up to the longest row, rounded up: few distinct shapes, so that kernels that are prepared
# per shape (oneDNN on CPU, captured graphs on CUDA) are prepared rarely.
COLUMN_BUCKET = 32


class Runner(Protocol):
    """What the engine needs of a network, whether it runs eagerly, compiled or as a captured graph."""

    cache: RaggedCache
    forwards: int

    def forward(self, tokens: Tensor, positions: Tensor, columns: int, first_row: int = 0) -> Tensor:
        """Runs `tokens` (`[B, q]` int64) of cache rows `first_row..first_row + B` at `positions` (`[B, q]` int64).

        Writes their K/V, attends over columns `0..columns` and returns logits `[B, q, vocab]`.
        """
        ...

    def prefill(self, tokens: Tensor, positions: Tensor, columns: int, first_row: int = 0) -> None:
        """The same forward for its K/V alone."""
        ...


class EagerRunner:
    """The network's ordinary forward.

    Args:
        network: a shadow (:func:`~spec_trl.generation.shadow.make_shadow`) or its quantized twin.
        cache: where it reads and writes K/V; a self-drafter shares its target's.
    """

    def __init__(self, network: PreTrainedModel, cache: RaggedCache) -> None:
        self.network = network
        self.cache = cache
        self.forwards = 0
        config = network.config.get_text_config(decoder=True)
        self._masks = MaskPlan.from_config(config)
        self._position_limit = position_limit(network)
        self._keeps_last_logits = network._supports_logits_to_keep()

    def forward(self, tokens: Tensor, positions: Tensor, columns: int, first_row: int = 0) -> Tensor:
        return self._run(tokens, positions, columns, first_row, logits_to_keep=0)

    def prefill(self, tokens: Tensor, positions: Tensor, columns: int, first_row: int = 0) -> None:
        self._run(tokens, positions, columns, first_row, logits_to_keep=1)  # 1: the fewest a head can be asked for

    def _run(self, tokens: Tensor, positions: Tensor, columns: int, first_row: int, logits_to_keep: int) -> Tensor:
        columns = min(-(-columns // COLUMN_BUCKET) * COLUMN_BUCKET, self.cache.columns)
        self.cache.point_at(positions, columns, first_row)
        device = tokens.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.network.dtype
        # Drafts of a row about to end may lie past the last position; their outputs are discarded, but a learned
        # position table must not be read out of range. RoPE goes on, as it does in `generate`.
        limit = self._position_limit
        position_ids = positions if limit is None else positions.clamp(max=limit - 1)  # [B, q]
        keep = {"logits_to_keep": logits_to_keep} if self._keeps_last_logits else {}
        self.forwards += 1
        return self.network(
            input_ids=tokens,
            position_ids=position_ids,
            attention_mask=self._masks.build(positions, columns, dtype),
            past_key_values=self.cache,
            use_cache=True,
            **keep,
        ).logits
