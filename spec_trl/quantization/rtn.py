"""Defines quantization schemes, and rounds weights to nearest (ER §3.1, §C.4).

4 bits are asymmetric by group, with integer zero points, or NF4; 8 bits are symmetric by row. The range contains 0, so
zero weights stay exactly zero. The scale is rounded to the kernel's activation dtype before the codes are computed
with it: every kernel multiplies with the same numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..value_checks import require_choice
from .kernels import PackedWeight, QuantizedRows
from .kernels.base import normal_floats


GROUP_SIZES = (128, 64, 32)  # every 4-bit kernel takes these three
MIN_SCALE = 1e-5  # avoids a division by zero in an all-zero group
# Weights per step. A CPU's scratch should stay near the cache and hold some blocks of rows for the threads to share; a
# step on a GPU must outlast its launches.
CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 24


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme, by the name that users write.

    Attributes:
        bits: bits per weight, 4 or 8.
        group: the largest number of weights of a row that may share a scale; None = the whole row.
        activation_aware: scale the input channels by the size of the activations (AWQ, ER §C.4).
        normal_float: the 16 codes are NF4's values, not equal steps.
    """

    name: str
    bits: int
    group: int | None
    activation_aware: bool = False
    normal_float: bool = False

    def group_for(self, in_features: int) -> int | None:
        """Weights per scale in a row of `in_features` (ER §3.1): the largest group that divides it, or None."""
        if self.group is None:
            return in_features
        return next((g for g in GROUP_SIZES if g <= self.group and in_features % g == 0), None)


SCHEMES = (
    *(Scheme(f"rtn-w4-g{group}", 4, group) for group in GROUP_SIZES),
    Scheme("rtn-w8", 8, None),
    *(Scheme(f"awq-w4-g{group}", 4, group, activation_aware=True) for group in GROUP_SIZES),
    Scheme("nf4", 4, 64, normal_float=True),
)


def find_scheme(name: str) -> Scheme:
    """Returns the scheme called `name`; raises ValueError for an unknown name."""
    schemes = {scheme.name: scheme for scheme in SCHEMES}
    require_choice("scheme", name, list(schemes))
    return schemes[name]


class RoundToNearest:
    """Quantizes weights into packed weights through one scratch memory."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def quantize_(self, weight: Tensor, packed: PackedWeight, scales: Tensor | None = None) -> None:
        """Writes `weight` [out, in], of any floating dtype and strides, times `scales` [in] if given, into
        `packed`."""
        out, columns = weight.shape
        chunk = CPU_CHUNK if weight.device.type == "cpu" else GPU_CHUNK
        step = max(1, chunk // (columns * packed.row_block)) * packed.row_block  # rows
        for first in range(0, out, step):
            packed.pack_(first, self._round(weight[first : first + step], packed, scales))

    def _round(self, source: Tensor, packed: PackedWeight, scales: Tensor | None) -> QuantizedRows:
        """`source` [rows, in] times `scales` [in], rounded; the codes are in scratch memory."""
        values = self._borrow(computing_dtype(source.dtype), source).copy_(source)  # [rows, in]
        if scales is not None:
            values.mul_(scales)  # [rows, in]
        codes = self._borrow(torch.int32, source)  # [rows, in]
        four = _round_to_normal_floats if packed.normal_float else _round_to_4_bits
        round_rows = four if packed.bits == 4 else _round_to_8_bits
        return round_rows(values, codes, packed.layer.group, packed.activation_dtype)

    def _borrow(self, dtype: torch.dtype, like: Tensor) -> Tensor:
        """Scratch memory of `like`'s shape, until the next call with the same dtype."""
        key = (like.device, dtype)
        if key not in self._scratch or self._scratch[key].numel() < like.numel():
            self._scratch[key] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return self._scratch[key][: like.numel()].view(like.shape)


def computing_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the quantizer's arithmetic for weights of this dtype."""
    return torch.float64 if weight_dtype == torch.float64 else torch.float32


def _round_to_4_bits(values: Tensor, codes: Tensor, group: int, scale_dtype: torch.dtype) -> QuantizedRows:
    """Asymmetric by group. Overwrites `values` [rows, in], fills `codes` int32 [rows, in]."""
    grouped = values.view(values.shape[0], -1, group)  # [rows, groups, group]
    low = grouped.amin(-1).clamp_(max=0)  # [rows, groups]
    high = grouped.amax(-1).clamp_(min=0)  # [rows, groups]
    scales = high.sub_(low).div_(15).clamp_(min=MIN_SCALE).to(scale_dtype)  # [rows, groups]
    steps = scales.to(values.dtype)  # [rows, groups], rounded
    zeros = low.div_(steps).neg_().round_().clamp_(0, 15)  # [rows, groups]
    grouped.div_(steps[..., None]).add_(zeros[..., None]).round_().clamp_(0, 15)  # [rows, groups, group]
    return QuantizedRows(codes.copy_(values), scales, zeros)


def _round_to_normal_floats(values: Tensor, codes: Tensor, group: int, scale_dtype: torch.dtype) -> QuantizedRows:
    """NF4: the nearest of 16 values times the largest magnitude of the group (QLoRA §3). Overwrites `values` [rows,
    in], fills `codes` int32 [rows, in]."""
    grouped = values.view(values.shape[0], -1, group)  # [rows, groups, group]
    scales = torch.maximum(grouped.amax(-1), grouped.amin(-1).neg_()).clamp_(min=MIN_SCALE).to(scale_dtype)
    grouped.div_(scales.to(values.dtype)[..., None])  # [rows, groups, group], -1 … 1
    levels = normal_floats(values.dtype, values.device)  # [16]
    torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True, out=codes)  # [rows, in]
    return QuantizedRows(codes, scales, torch.zeros_like(scales))


def _round_to_8_bits(values: Tensor, codes: Tensor, group: int, scale_dtype: torch.dtype) -> QuantizedRows:
    """Symmetric by group, here the row. Overwrites `values` [rows, in], fills `codes` int32 [rows, in]."""
    grouped = values.view(values.shape[0], -1, group)  # [rows, groups, group]
    largest = torch.maximum(grouped.amax(-1), grouped.amin(-1).neg_())  # [rows, groups]
    scales = largest.div_(127).clamp_(min=MIN_SCALE).to(scale_dtype)  # [rows, groups]
    grouped.div_(scales.to(values.dtype)[..., None]).round_().clamp_(-127, 127)  # [rows, groups, group]
    return QuantizedRows(codes.copy_(values), scales, torch.zeros_like(scales))
