"""Multiplies 4-bit weights on a GPU by our Triton kernel, for the few rows of drafting. This file is the layout.

A row of the weight is cut into spans of 8 * W columns (W = 32, or 16 where 256 does not divide the row), and a span
into W words of 8 nibbles. Nibble i of word j is column i * W + j, so the nibbles i of a row's words are W neighbouring
columns, the matching rows of xᵀ are one contiguous slice of x, and a slice lies within a group of 32, 64 or 128.

    one span of one row, W = 32       columns     0 .. 31 | 32 .. 63 |  ...  | 224 .. 255
                                      nibble         0    |     1    |  ...  |     7
    word j  =  column j | column 32 + j << 4 | ... | column 224 + j << 28

    words [rows / 16, spans, 16, W]: the same span of 16 rows lies together, 2 KiB; spans follow one another

Rows and columns are padded, to 16 rows and whole spans, with scale 0. Each row and group has one more word: the scale
in its upper half, and -(128 + zero) in its lower half, both in bfloat16. `triton_int4_mm` says why.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import LayerSpec, Package, PackedWeight, QuantizedRows, join_nibbles, pad_rows


class TritonInt4(PackedWeight):
    """`spec_trl::triton_int4_mm`, in bfloat16."""

    name = "triton"
    bits = 4
    device_type = "cuda"
    package = Package("triton", "triton", "triton")
    activation_dtypes = (torch.bfloat16,)
    row_block = 16
    rows_along = {"codes": 0, "scales_and_offsets": 1}

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        from .triton_int4_mm import tiles_for  # registers the operator

        words = 32 if layer.in_features % 256 == 0 else 16
        spans, blocks = -(-layer.in_features // (8 * words)), -(-layer.out_features // 16)
        self.codes = self.allocate(blocks, spans, 16, words, dtype=torch.int32)  # [rows/16, spans, 16, words]
        # [groups, stored_rows]
        self.scales_and_offsets = self.allocate(spans * 8 * words // layer.group, blocks * 16, dtype=torch.int32)
        self.arrivals = self.allocate(tiles_for(layer.out_features), dtype=torch.int32)  # [tiles]

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        _, spans, _, words = self.codes.shape
        count = len(rows.scales)
        offsets = -(128 + rows.zeros.to(torch.bfloat16))  # [rows, groups], exact
        low = offsets.view(torch.int16).int() & 0xFFFF  # [rows, groups]
        high = rows.scales.view(torch.int16).int() << 16  # [rows, groups]
        self.scales_and_offsets[: self.layer.groups, first_row : first_row + count] = (high | low).T  # [groups, rows]
        codes = pad_rows(rows, 16).codes  # [rows, in]
        columns = spans * 8 * words
        if columns != codes.shape[1]:
            codes = F.pad(codes, (0, columns - codes.shape[1]))  # [rows, columns]
        nibbles = codes.view(-1, 16, spans, 8, words)  # [rows/16, 16, spans, 8, words]
        packed = join_nibbles([nibbles[:, :, :, i] for i in range(8)])  # [rows/16, 16, spans, words]
        first = first_row // 16
        self.codes[first : first + len(packed)] = packed.transpose(1, 2)  # [rows/16, spans, 16, words]

    def linear(self, x: Tensor) -> Tensor:
        weight = self.codes, self.scales_and_offsets, self.arrivals
        return torch.ops.spec_trl.triton_int4_mm(
            x.contiguous(), *weight, self.layer.out_features, self.layer.group
        )  # [m, out]
