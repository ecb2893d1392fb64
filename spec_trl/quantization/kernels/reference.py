"""Unpacks, dequantizes and multiplies: the kernels that run everywhere. For tests and comparisons; slower than
dense."""

import sys
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows, normal_floats


class Reference(PackedWeight):
    """Computes in the policy's dtype, float64 included, for any number of rows."""

    name = "reference"
    max_rows = sys.maxsize

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The weight that the codes stand for, [out, in] in activation_dtype."""

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize())  # [m, out]


class ReferenceInt4(Reference):
    """Two 4-bit codes to a byte, zero points as bytes."""

    bits = 4
    rows_along = {"nibbles": 0, "scales": 0, "zeros": 0}

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        out = layer.out_features
        self.nibbles = self.allocate(out, layer.in_features // 2, dtype=torch.uint8)  # [out, in/2]
        self.scales = self.allocate(out, layer.groups, dtype=self.activation_dtype)  # [out, groups]
        self.zeros = self.allocate(out, layer.groups, dtype=torch.uint8)  # [out, groups]

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        to = slice(first_row, first_row + len(rows.codes))
        torch.add(rows.codes[:, 0::2], rows.codes[:, 1::2], alpha=16, out=self.nibbles[to])  # [rows, in/2]
        self.scales[to] = rows.scales  # [rows, groups]
        self.zeros[to] = rows.zeros  # [rows, groups]

    def unpack(self) -> Tensor:
        """The codes that were packed, uint8 [out, in]."""
        return torch.stack((self.nibbles & 15, self.nibbles >> 4), dim=-1).flatten(1)  # [out, in]

    def dequantize(self) -> Tensor:
        codes = self.unpack().view(-1, self.layer.groups, self.layer.group)  # [out, groups, group]
        steps = codes.to(self.activation_dtype) - self.zeros[..., None]  # [out, groups, group]
        return (steps * self.scales[..., None]).flatten(1)  # [out, in]


class ReferenceNF4(ReferenceInt4):
    """The same bytes; the zero points stay 0."""

    normal_float = True

    def dequantize(self) -> Tensor:
        values = normal_floats(self.activation_dtype, self.layer.device)[self.unpack().int()]  # [out, in]
        return (values.view(-1, self.layer.groups, self.layer.group) * self.scales[..., None]).flatten(1)  # [out, in]


class ReferenceInt8(Reference):
    """One signed byte per weight, one scale per row."""

    bits = 8

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.codes = self.allocate(layer.out_features, layer.in_features, dtype=torch.int8)  # [out, in]
        self.scales = self.allocate(layer.out_features, dtype=self.activation_dtype)  # [out]

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        to = slice(first_row, first_row + len(rows.codes))
        self.codes[to] = rows.codes  # [rows, in]
        self.scales[to] = rows.scales[:, 0]  # [rows]

    def dequantize(self) -> Tensor:
        return self.codes.to(self.activation_dtype) * self.scales[:, None]  # [out, in]
