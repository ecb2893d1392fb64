"""Multiplies 4-bit and 8-bit weights by the kernels of torch, in bfloat16.

The 4-bit ones dequantize as (code - 8) * scale + offset, with scale and offset in bfloat16. Our (code - zero) * scale
is the same with offset = (8 - zero) * scale, up to the rounding of the offset.
"""

import torch
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows, pad_rows
from .reference import ReferenceInt8


aten = torch.ops.aten

INT8_MAX_ROWS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 16, torch.float64: 32}
"""Most rows of x with a gain over `F.linear` in the policy's dtype (measured)."""


class _TorchInt4(PackedWeight):
    """Base of the two layouts: scale and offset interleaved, as [groups, stored_rows, 2]."""

    name = "torch_int4"
    bits = 4
    activation_dtypes = (torch.bfloat16,)

    def __init__(self, layer: LayerSpec, stored_rows: int) -> None:
        super().__init__(layer)
        self.scales_and_offsets = self.allocate(layer.groups, stored_rows, 2, dtype=torch.bfloat16)

    def _pack_scales_(self, first_row: int, rows: QuantizedRows) -> None:
        to = slice(first_row, first_row + len(rows.scales))
        self.scales_and_offsets[:, to, 0] = rows.scales.T  # [groups, rows]
        self.scales_and_offsets[:, to, 1] = ((8 - rows.zeros) * rows.scales).T  # [groups, rows]


class TorchInt4Cpu(_TorchInt4):
    """`torch._weight_int4pack_mm_for_cpu`."""

    device_type = "cpu"
    row_block = 64  # the op packs blocks of 64 rows one after the other

    def __init__(self, layer: LayerSpec) -> None:
        stored_rows = -(-layer.out_features // 16) * 16  # the op wants a multiple of 16: rows of zeros follow
        super().__init__(layer, stored_rows)
        # Most rows of x with a gain over `F.linear` in the policy's dtype, measured with 2 threads on an Intel CPU
        # with AMX, which speeds up dense bfloat16 alone, and on an AMD CPU without.
        limits = {torch.float64: (64, 64), torch.float32: (64, 16)}  # without AMX, with it
        self.max_rows = limits.get(layer.policy_dtype, (16, 4))[torch.cpu._is_amx_tile_supported()]
        # [stored_rows, in/2], permuted in blocks of 64 rows
        self.codes = self.allocate(stored_rows, layer.in_features // 2, dtype=torch.uint8)

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        rows = pad_rows(rows, 16)
        packed = aten._convert_weight_to_int4pack_for_cpu(rows.codes, 1)  # the op cannot write in place
        self.codes[first_row : first_row + len(packed)] = packed  # [rows, in/2]
        self._pack_scales_(first_row, rows)

    def linear(self, x: Tensor) -> Tensor:
        y = aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.codes, self.layer.group, self.scales_and_offsets)
        return y[:, : self.layer.out_features]  # [m, out]


class TorchInt4Cuda(_TorchInt4):
    """tinygemm, `torch._weight_int4pack_mm`, on NVIDIA GPUs from Ampere on. Its cost grows with ceil(rows / 16)."""

    device_type = "cuda"
    multiples = (8, 1)
    row_block = 8

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer, layer.out_features)
        # tinygemm loads 8, 4 or 2 tiles of 16 columns at once; every group size has at least 2
        self.inner_tiles = next(tiles for tiles in (8, 4, 2) if layer.in_features % (16 * tiles) == 0)
        self.codes = self.allocate(
            layer.out_features // 8, layer.in_features // (16 * self.inner_tiles), 32, self.inner_tiles // 2,
            dtype=torch.int32,
        )  # [out/8, in/(16 tiles), 32, tiles/2]  # fmt: skip

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        pairs = rows.codes[:, 0::2] * 16 + rows.codes[:, 1::2]  # [rows, in/2], the even column in the high nibble
        packed = aten._convert_weight_to_int4pack(pairs.to(torch.uint8), self.inner_tiles)
        self.codes[first_row // 8 : first_row // 8 + len(packed)] = packed  # [rows/8, in/(16 tiles), 32, tiles/2]
        self._pack_scales_(first_row, rows)

    def linear(self, x: Tensor) -> Tensor:
        return aten._weight_int4pack_mm(x.contiguous(), self.codes, self.layer.group, self.scales_and_offsets)


class TorchInt8Cpu(ReferenceInt8):
    """The reference's layout with a faster product."""

    name = "torch_int8"
    device_type = "cpu"
    activation_dtypes = (torch.bfloat16,)
    multiples = (1, 16)  # the op does not check: with others it returns garbage or crashes

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.max_rows = INT8_MAX_ROWS[layer.policy_dtype]

    def linear(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)  # [m, out]
