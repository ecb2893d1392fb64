"""Learned drafters over whole sequences at once, with gradients: from every place where drafting could have begun."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.drafters.dflash.network import DFlashNetwork
from ..generation.drafters.eagle3.network import Eagle3Network


class Unroll:
    """EAGLE-3 from every pair of whole sequences, fed with its own output and the true tokens.

    Args:
        network: EAGLE-3.
        embedded: `[B, N, H]`, of the pairs' tokens: token i + 1 in pair i.
        projected: `[B, N, H]`, the pairs' projected features.
    """

    def __init__(self, network: Eagle3Network, embedded: Tensor, projected: Tensor) -> None:
        self._network, self._embedded = network, embedded
        pairs = torch.arange(embedded.shape[1], device=embedded.device)  # [N]
        mask = _causal(pairs, embedded.shape[1], embedded.dtype)  # [1, 1, N, N]
        self._real = _Appending()
        self._first = network(embedded, projected, pairs[None], mask, self._real)  # [B, N, H]

    def outputs(self, starts: slice, depth: int) -> list[Tensor]:
        """h of each step, `depth` of `[B, n, H]`, for the n pairs `starts` to start from.

        Step k (from 1) of start i is pair i + k - 1, which holds token i + k and predicts the one behind. Where there
        is no such token the last one stands in: nothing may count there.
        """
        network, embedded = self._network, self._embedded
        first = torch.arange(starts.start, starts.stop, device=embedded.device)  # [n]
        mask = _causal(first, starts.stop, embedded.dtype)  # [1, 1, n, stop]
        own = mask.new_full((len(first), len(first)), torch.finfo(mask.dtype).min).fill_diagonal_(0)  # [n, n]
        store = self._real.up_to(starts.stop)
        found = [self._first[:, starts]]  # of [B, n, H]
        for step in range(1, depth):
            mask = torch.cat([mask, own[None, None]], dim=-1)  # [1, 1, n, stop + step * n]
            tokens = embedded[:, (first + step).clamp(max=embedded.shape[1] - 1)]  # [B, n, H]
            found.append(network(tokens, network.fed_back(found[-1]), (first + step)[None], mask, store))
        return found


class _Appending:
    """K/V of all forwards so far, side by side: `[B, kv, columns, d]`."""

    def __init__(self, *states: Tensor) -> None:
        self._states = states

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        if self._states:
            new = tuple(torch.cat(both, dim=2) for both in zip(self._states, new, strict=True))  # type: ignore
        self._states = new
        return new

    def up_to(self, stop: int) -> "_Appending":
        """One that begins with the first `stop` columns of this."""
        return _Appending(*(states[:, :, :stop] for states in self._states))


def _causal(queries: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Additive `[1, 1, q, keys]`: queries at these positions (`[q]`) see the keys up to their own."""
    mask = torch.zeros(len(queries), keys, dtype=dtype, device=queries.device)
    hidden = torch.arange(keys, device=queries.device) > queries[:, None]  # [q, keys]
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


def block_states(
    network: DFlashNetwork, target: PreTrainedModel, tokens: Tensor, features: Tensor, anchors: Tensor
) -> Tensor:
    """States of many blocks of the same sequences, whose context goes through the network once.

    Args:
        network: DFlash.
        target: gives the embedding, unless the network has its own.
        tokens: `[B, T]` int64.
        features: `[B, T, feature width]`.
        anchors: `[B, M]` int64 positions.

    Returns:
        `[B, M, block_size, H]`, as :meth:`DFlashNetwork.forward` gives for each anchor.
    """
    size, (batch, count), width = network.config.block_size, anchors.shape, tokens.shape[1]
    canvas = torch.full((batch, count, size), network.config.mask_token, device=tokens.device)
    canvas[:, :, 0] = tokens.gather(1, anchors)
    with torch.no_grad():
        embedded = network.embed(canvas.flatten(0, 1), target.get_input_embeddings())  # [B * M, n, H]
    context: list[tuple[Tensor, Tensor]] = []

    def keep(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        context.append((keys, values))  # [B, kv, T, d]
        return keys, values

    def join(index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old = (states.repeat_interleave(count, dim=0) for states in context[index])  # [B * M, kv, T, d]
        keys, values = (torch.cat(both, dim=2) for both in zip(old, (keys, values), strict=True))
        return keys, values  # [B * M, kv, T + n, d]

    positions = torch.arange(width, device=tokens.device)[None]  # [1, T]
    network.remember(features.to(network.fc.weight.dtype), positions, keep)
    flat = anchors.flatten()  # [B * M]
    slots = flat[:, None] + torch.arange(size, device=tokens.device)  # [B * M, n]
    keys = torch.cat([positions.expand(len(flat), -1), slots], dim=1)  # [B * M, T + n]
    is_block = (torch.arange(keys.shape[1], device=keys.device) >= width).expand_as(keys)
    masks = network.config.masks(flat, keys, is_block, embedded.dtype)
    return network.refine(embedded, slots, masks, join).unflatten(0, (batch, count))
