"""Multiplies 4-bit and 8-bit weights on a CPU in our C++, which on x86 rounds x to 8 bits by row."""

import torch
from torch import Tensor

from ...native.cpu_products import CODE_BLOCK, MOST_ROWS, Matrix, library, multiply_matrix
from ...native.native_code import untraced
from .base import LayerSpec, PackedWeight, QuantizedRows
from .reference import ReferenceInt8


class Native(PackedWeight):
    """Base of both widths."""

    name = "native"
    device_type = "cpu"
    activation_dtypes = (torch.float32,)
    max_rows = MOST_ROWS
    codes: Tensor
    scales: Tensor

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        found = super().unsupported(layer)
        return "no C++ compiler" if found is None and library(layer.bits, torch.float32) is None else found

    def matrix(self, bias: Tensor | None) -> Matrix:
        """Arguments of the C++; the buffers never move. `bias`: float32 [out]."""
        tensors = self.codes, self.scales, self._buffers.get("zeros"), bias
        pointers = (None if each is None else each.data_ptr() for each in tensors)
        return Matrix(*pointers, self.layer.out_features, self.layer.in_features, self.bits, self.layer.group, 0)

    @untraced
    def linear(self, x: Tensor) -> Tensor:
        return multiply_matrix(self.matrix(None), x)  # [m, out]


class NativeInt4(Native):
    """Codes in blocks of 64 inputs, 16 words of four: nibble j of word l is input 16 j + l. Groups of 64 and 128."""

    bits = 4
    multiples = (1, CODE_BLOCK)
    rows_along = {"codes": 0, "scales": 0, "zeros": 0}

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        out, groups = layer.out_features, layer.groups
        self.codes = self.allocate(out, layer.in_features // 64, 16, dtype=torch.int16)  # [out, in/64, 16]
        self.scales = self.allocate(out, groups, dtype=torch.float32)  # [out, groups]
        self.zeros = self.allocate(out, groups, dtype=torch.uint8)  # [out, groups]

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.group % CODE_BLOCK:
            return f"a group of {layer.group} is no multiple of {CODE_BLOCK}"
        return super().unsupported(layer)

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        to = slice(first_row, first_row + len(rows.codes))
        nibbles = rows.codes.unflatten(1, (-1, 4, 16)).unbind(2)  # [rows, in/64, 16] each
        words = nibbles[0] + nibbles[1] * 16 + nibbles[2] * 256 + nibbles[3] * 4096
        self.codes[to] = (words - (words >> 15 << 16)).to(torch.int16)  # as signed numbers
        self.scales[to] = rows.scales  # [rows, groups]
        self.zeros[to] = rows.zeros  # [rows, groups]


class NativeInt8(Native, ReferenceInt8):
    """The reference's layout: plain int8 rows."""

    multiples = (1, 4)  # the codes of a word
    rows_along = {"codes": 0, "scales": 0}
    max_rows = 2 * MOST_ROWS  # a byte is a number with fewer instructions than half a byte
