"""What Marlin and Humming share: 4-bit weights as the lanes of a tensor-core fragment want to load them.

    codes   int32 [in / 16, 2 * stored_rows], each kernel in its own order
    scales  bfloat16 [groups, stored_rows]: of 64 rows, those with the same row % 8 lie together
    zeros   int32 [groups, stored_rows / 8]: permuted like the scales, then 8 to a word in an order of the kernel

Rows of the weight are padded to `stored_rows` with scale 0.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows, join_nibbles, pad_rows


class FragmentInt4(PackedWeight):
    """Stores scales and zero points; the subclass brings the order of the codes, and the product.

    Args:
        layer: what to hold.
        stored_rows: rows with padding; a multiple of 64.
        locks: number of counters that the kernel's programs need to find out which of them comes last.

    Attributes:
        zero_order: which of 8 neighbouring zero points fills each nibble of a word, from the lowest on.
    """

    bits = 4
    device_type = "cuda"
    activation_dtypes = (torch.bfloat16,)
    row_block = 64
    zero_order: ClassVar[tuple[int, ...]]

    def __init__(self, layer: LayerSpec, stored_rows: int, locks: int) -> None:
        super().__init__(layer)
        self.codes = self.allocate(layer.in_features // 16, 2 * stored_rows, dtype=torch.int32)
        self.scales = self.allocate(layer.groups, stored_rows, dtype=torch.bfloat16)
        self.zeros = self.allocate(layer.groups, stored_rows // 8, dtype=torch.int32)
        self.locks = self.allocate(locks, dtype=torch.int32)  # 0 again after each call

    @abstractmethod
    def order_codes(self, codes: Tensor) -> Tensor:
        """int32 [rows, in] of codes → int32 [in/16, 2 rows] of words; 64 divides the rows."""

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        rows = pad_rows(rows, 64)
        first, last = first_row, first_row + len(rows.codes)
        self.codes[:, 2 * first : 2 * last] = self.order_codes(rows.codes)  # [in/16, 2 rows]
        self.scales[:, first:last] = permute_scales(rows.scales)  # [groups, rows]
        zeros = permute_scales(rows.zeros).int()  # [groups, rows]
        words = join_nibbles([zeros[:, place::8] for place in self.zero_order])  # [groups, rows/8]
        self.zeros[:, first // 8 : last // 8] = words


def permute_scales(values: Tensor) -> Tensor:
    """[rows, groups] → [groups, rows], of each 64 rows those with the same row % 8 together."""
    rows, groups = values.shape
    return values.view(rows // 64, 8, 8, groups).permute(3, 0, 2, 1).reshape(groups, rows)  # [groups, rows]
