"""DFlash: a trained network drafts a block in one forward, conditioned on the target's hidden states."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..canvas import Canvas
from ..feature_drafter import FeatureDrafter
from ..feature_network import Store
from .config import DFlashConfig
from .network import DFlashNetwork


class DFlashDrafter(FeatureDrafter):
    """Drafts blocks with a DFlash checkpoint of the z-lab or the speculators format (arXiv 2602.06036).

    The target's features become K/V of the drafter's layers as they are told: column i of its own ragged cache holds
    the context at position i of the row. A block's K/V is written after the context, where the features of the tokens
    that come to stand there overwrite it.
    """

    strategy = "dflash"
    weight_rate = 0.25  # measured: benchmarks/results/tts_rates.json
    network: DFlashNetwork
    config: DFlashConfig
    network_type = DFlashNetwork
    borrowed = ("embed_tokens.weight", "lm_head.weight")

    def parse(self, settings: Mapping[str, Any], target: PreTrainedConfig) -> DFlashConfig:
        return DFlashConfig.parse(settings)

    @property
    def forward_size(self) -> tuple[int, int]:  # type: ignore[override]
        return self.config.block_size, self.config.drafts

    @property
    def most_drafts(self) -> int:  # type: ignore[override]
        return self.config.drafts

    def take_features(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        self.network.remember(features, positions, self.cache.update)

    def draft_logits(self, count: int) -> Iterator[Tensor]:
        rows = self.session.rows
        self.forwards += 1
        slots = rows.columns_after(-1, self.config.block_size)  # [B, n]
        columns = self.point_at(slots, rows.longest - 1 + self.config.block_size)
        logits = self._block_logits(self.network, rows.window(-1, 1), slots, columns, self.cache.update, count)
        yield from logits.split(1, dim=1)  # [B, 1, draft vocabulary] each

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
        return self._block_logits(network, canvas.tokens_after(-1, 1), slots, canvas.columns, cache.update, count)

    def position_weights(self, count: int) -> list[float]:
        """exp(-(k - 1) / γ_w), with γ_w 7 for blocks of 16 and 4 for blocks of 8 (published), and a straight line
        through both, not below 1, for others."""
        decay = max(4 + (self.config.block_size - 8) * (7 - 4) / (16 - 8), 1.0)
        return [math.exp(-k / decay) for k in range(count)]

    def _block_logits(
        self, network: DFlashNetwork, newest: Tensor, slots: Tensor, columns: int, store: Store, count: int
    ) -> Tensor:
        """Logits `[B, count, draft vocabulary]` of the first drafted slots of one block per row, which begins with the
        `newest` token `[B, 1]`, in the columns `slots` `[B, n]`, where `store` writes; it returns all `columns`."""
        config = self.config
        assert self.session.target is not None
        anchors = slots[:, :1]  # [B, 1]
        tokens = torch.full_like(slots, config.mask_token)  # [B, n]
        tokens[:, :1] = newest
        embedded = network.embed(tokens, self.embeddings)  # [B, n, H]
        keys = torch.arange(columns, device=slots.device)[None]  # [1, columns]
        masks = config.masks(anchors[:, 0], keys, keys >= anchors, embedded.dtype)
        with self.own_dtype():
            states = network.refine(embedded, slots, masks, store)  # [B, n, H]
        first = config.block_size - config.drafts
        return network.logits(states[:, first : first + count], self.session.target.network.get_output_embeddings())
