"""The kernel that runs everywhere: unpack, dequantize, multiply. For tests and comparisons; slower than dense."""

import sys
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows


class ReferenceInt4(PackedWeight):
    """Two 4-bit codes to a byte, zero points as bytes; computes in the policy's dtype, float64 included."""

    name: ClassVar[str] = "reference"
    bits: ClassVar[int] = 4
    device_type: ClassVar[None] = None
    row_block: ClassVar[int] = 1

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.max_rows = sys.maxsize
        self.activation_dtype = layer.activation_dtype or layer.policy_dtype
        out, device = layer.out_features, layer.device
        nibbles = torch.empty(out, layer.in_features // 2, dtype=torch.uint8, device=device)  # [out, in/2]
        scales = torch.empty(out, layer.groups, dtype=self.activation_dtype, device=device)  # [out, groups]
        zeros = torch.empty(out, layer.groups, dtype=torch.uint8, device=device)  # [out, groups]
        self.register_buffer("nibbles", nibbles, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("zeros", zeros, persistent=False)

    nibbles: Tensor
    scales: Tensor
    zeros: Tensor

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        return None

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        assert rows.zeros is not None
        to = slice(first_row, first_row + rows.codes.shape[0])
        torch.add(rows.codes[:, 0::2], rows.codes[:, 1::2], alpha=16, out=self.nibbles[to])  # [rows, in/2]
        self.scales[to] = rows.scales  # [rows, groups]
        self.zeros[to] = rows.zeros  # [rows, groups]

    def dequantize(self) -> Tensor:
        """The weight the codes stand for, [out, in] in activation_dtype."""
        codes = torch.stack((self.nibbles & 15, self.nibbles >> 4), dim=-1)  # [out, in/2, 2]
        codes = codes.view(self.layer.out_features, self.layer.groups, self.layer.group)  # [out, groups, group]
        steps = codes.to(self.activation_dtype) - self.zeros[..., None]  # [out, groups, group]
        return (steps * self.scales[..., None]).flatten(1)  # [out, in]

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize())  # [m, out]


class ReferenceInt8(PackedWeight):
    """One signed byte per weight, one scale per row; computes in the policy's dtype, float64 included."""

    name: ClassVar[str] = "reference"
    bits: ClassVar[int] = 8
    device_type: ClassVar[None] = None
    row_block: ClassVar[int] = 1

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.max_rows = sys.maxsize
        self.activation_dtype = layer.activation_dtype or layer.policy_dtype
        shape, device = (layer.out_features, layer.in_features), layer.device
        self.register_buffer("codes", torch.empty(shape, dtype=torch.int8, device=device), persistent=False)
        scales = torch.empty(layer.out_features, dtype=self.activation_dtype, device=device)  # [out]
        self.register_buffer("scales", scales, persistent=False)

    codes: Tensor
    scales: Tensor

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        return None

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        to = slice(first_row, first_row + rows.codes.shape[0])
        self.codes[to] = rows.codes  # [rows, in]
        self.scales[to] = rows.scales[:, 0]  # [rows]

    def dequantize(self) -> Tensor:
        """The weight the codes stand for, [out, in] in activation_dtype."""
        return self.codes.to(self.activation_dtype) * self.scales[:, None]  # [out, in]

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize())  # [m, out]
