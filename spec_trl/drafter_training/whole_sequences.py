"""Runs learned drafters over whole sequences, with gradients, from every position."""

from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..generation.drafters.dflash.dflash_network import DFlashNetwork
from ..generation.drafters.eagle3.eagle3_drafter import CAUSAL
from ..generation.drafters.eagle3.eagle3_network import Eagle3Network
from ..generation.drafters.target_parts import plain_embedding


class Unroll:
    """EAGLE-3 from every pair of whole sequences, on its output and the true tokens. Arguments are embeddings `[B, N,
    H]` of the pairs' tokens, token i + 1 in pair i, and projections `[B, N, H]` of their features."""

    def __init__(self, network: Eagle3Network, embedded: Tensor, projected: Tensor) -> None:
        self._network, self._embedded = network, embedded
        pairs = torch.arange(embedded.shape[1], device=embedded.device)  # [N]
        mask = CAUSAL.build(pairs[None], embedded.shape[1], embedded.dtype)  # [1, 1, N, N]
        self._real = DynamicCache()
        self._first = network(embedded, projected, pairs[None], mask, self._real.update)  # [B, N, H]

    def outputs(self, starts: slice, depth: int) -> list[Tensor]:
        """h of each step, `depth` of `[B, n, H]`, for the n pairs `starts` to start from.

        Step k (from 1) of start i is pair i + k - 1, which holds token i + k and predicts the next token. Outputs
        after the end, for which the last token is used, must not count.
        """
        network, embedded = self._network, self._embedded
        first = torch.arange(starts.start, starts.stop, device=embedded.device)  # [n]
        mask = cast(Tensor, CAUSAL.build(first[None], starts.stop, embedded.dtype))  # [1, 1, n, stop]
        alone = mask.new_full((len(first), len(first)), torch.finfo(mask.dtype).min).fill_diagonal_(0)  # [n, n]
        store = DynamicCache()
        for index, layer in enumerate(self._real.layers):
            store.update(layer.keys[:, :, : starts.stop], layer.values[:, :, : starts.stop], index)
        states = [self._first[:, starts]]  # of [B, n, H]
        for step in range(1, depth):
            mask = torch.cat([mask, alone[None, None]], dim=-1)  # [1, 1, n, stop + step * n]
            tokens = embedded[:, (first + step).clamp(max=embedded.shape[1] - 1)]  # [B, n, H]
            states.append(network(tokens, network.fed_back(states[-1]), (first + step)[None], mask, store.update))
        return states


def block_states(
    network: DFlashNetwork, target: PreTrainedModel, tokens: Tensor, features: Tensor, anchors: Tensor
) -> Tensor:
    """DFlash's states `[B, M, n, H]` of many blocks of n slots; the network reads the context once.

    Args:
        target: provides the embedding, unless the network has one.
        tokens: `[B, T]` int64.
        features: `[B, T, feature width]`. Features at or after a block's anchor are not seen.
        anchors: `[B, M]` int64 positions.
    """
    config, (count, length) = network.config, (anchors.shape[1], tokens.shape[1])
    canvas = torch.full((*anchors.shape, config.block_size), config.mask_token, device=tokens.device)  # [B, M, n]
    canvas[:, :, 0] = tokens.gather(1, anchors)
    embedded = network.embed(canvas.flatten(0, 1), plain_embedding(target))  # [B * M, n, H]
    first = anchors.flatten()  # [B * M]
    positions = torch.arange(length, device=tokens.device)  # [T]
    slots = first[:, None] + torch.arange(config.block_size, device=tokens.device)  # [B * M, n]
    keys = torch.cat([positions.expand(len(slots), -1), slots], dim=1)  # [B * M, T + n]
    is_block = torch.arange(keys.shape[1], device=keys.device).expand_as(keys) >= length
    context = DynamicCache()  # of [B, kv_heads, T, d], then [B * M, kv_heads, T + n, d] by layer
    network.remember(features.to(network.dtype), positions.expand_as(tokens), context.update)
    context.batch_repeat_interleave(count)
    states = network.refine(embedded, slots, config.masks(first, keys, is_block, embedded.dtype), context.update)
    return states.unflatten(0, anchors.shape)  # [B, M, n, H]
