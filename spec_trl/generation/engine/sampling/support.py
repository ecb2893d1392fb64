"""Packs the tokens that processors such as top-p kept at a position, its support, into a bit per token."""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(kept: Tensor) -> Tensor:
    """`[..., vocabulary]` bool -> `[..., ceil(vocabulary / 8)]` uint8; token v is bit v % 8 of byte v // 8."""
    bits = F.pad(kept, (0, -kept.shape[-1] % 8)).unflatten(-1, (-1, 8))  # [..., bytes, 8]
    return (bits << _bits(kept.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, vocabulary: int) -> Tensor:
    """What :func:`pack` packed: `[..., ceil(vocabulary / 8)]` uint8 -> `[..., vocabulary]` bool."""
    return (packed[..., None] >> _bits(packed.device) & 1).flatten(-2)[..., :vocabulary].bool()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
