"""Drafts a block in one forward with a trained DFlash network."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...engine.drafter import Forward
from ...registry import register_drafter
from ..feature_drafter import FeatureDrafter
from ..feature_network import Store
from ..trainable_drafter import Canvas
from .dflash_network import DFlashConfig, DFlashNetwork


@register_drafter
class DFlashDrafter(FeatureDrafter):
    """Drafts blocks with a DFlash checkpoint of the z-lab or the speculators format (arXiv 2602.06036).

    The target's features become K/V of the drafter's layers when they arrive: column i of the drafter's cache holds
    the context at position i of the row. A block's K/V is written after the context; later features overwrite it.
    """

    strategy = "dflash"
    weight_rate = 0.25  # found by `python -m benchmarks.tts rates`
    network: DFlashNetwork
    config: DFlashConfig
    network_type = DFlashNetwork
    borrowed = ("embed_tokens.weight", "lm_head.weight")
    renames = {"model.": ""}

    def parse(self, settings: Mapping[str, Any], target: PreTrainedConfig) -> DFlashConfig:
        return DFlashConfig.parse(settings)

    @property
    def forward_size(self) -> tuple[int, int]:  # type: ignore[override]
        return self.config.block_size, self.config.drafts

    @property
    def most_drafts(self) -> int:  # type: ignore[override]
        return self.config.drafts

    def take_features(self, features: Tensor, positions: Tensor) -> None:
        self.network.remember(features, positions, self.cache.update)

    def reach(self, count: int) -> int:
        return self.config.block_size - 1

    def forward_over(self, columns: int, count: int) -> Forward:
        logits = torch.empty(0)  # [B, count, draft vocabulary]

        def forward(tokens: Tensor, anchors: Tensor, step: int) -> Tensor:
            nonlocal logits
            if step == 0:
                slots = anchors + torch.arange(self.config.block_size, device=anchors.device)  # [B, n]
                visible = self.point_at(slots, columns)
                if self._runner.uses_spans:
                    masks = self.config.spans(anchors[:, 0], self.cache.table_to_read(len(anchors)))
                else:
                    masks = self._masks(slots, visible)
                logits = self._block_logits(self.network, tokens, slots, masks, self.cache.update, count)
            return logits[:, step : step + 1]

        return forward

    def columns_of_replay(self, draft_length: int) -> int:
        return self.config.block_size

    def replay(self, network: DFlashNetwork, canvas: Canvas) -> Tensor:
        cache = canvas.cache()
        if canvas.features is not None:
            context = canvas.columns_after(-1 - canvas.context, canvas.context)  # [B, context]
            cache.point_at(context)
            network.remember(canvas.features.to(network.dtype), context, cache.update)
        slots = canvas.columns_after(-1, self.config.block_size)  # [B, n]
        cache.point_at(slots)
        count = min(canvas.draft_length, self.config.drafts)
        masks = self._masks(slots, canvas.columns, network.dtype)
        return self._block_logits(network, canvas.tokens_after(-1, 1), slots, masks, cache.update, count)

    def position_weights(self, count: int) -> list[float]:
        """exp(-(k - 1) / γ_w), with γ_w 7 for blocks of 16 and 4 for blocks of 8 (published), and a straight line
        through both, not below 1, for others."""
        decay = max(4 + (self.config.block_size - 8) * (7 - 4) / (16 - 8), 1.0)
        return [math.exp(-k / decay) for k in range(count)]

    def _masks(self, slots: Tensor, columns: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Additive masks, by layer, for blocks in `slots` `[B, n]`, over the first `columns`."""
        keys = torch.arange(columns, device=slots.device)[None]  # [1, columns]
        return self.config.masks(slots[:, 0], keys, keys >= slots[:, :1], dtype or self.network.dtype)

    def _block_logits(
        self, network: DFlashNetwork, newest: Tensor, slots: Tensor, masks: list[Tensor], store: Store, count: int
    ) -> Tensor:
        """Logits `[B, count, draft vocabulary]` of the first drafted slots of one block per row, from the `newest`
        token `[B, 1]` on, in the columns `slots` `[B, n]` of `store`, under `masks` by layer."""
        tokens = torch.full_like(slots, self.config.mask_token)  # [B, n]
        tokens[:, :1] = newest
        embedded = network.embed(tokens, self.embeddings)  # [B, n, H]
        with self.own_dtype():
            states = network.refine(embedded, slots, masks, store)  # [B, n, H]
        first = self.config.block_size - self.config.drafts
        return network.logits(states[:, first : first + count], self._head)
