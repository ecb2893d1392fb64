"""The 4-bit kernels of torch core: AVX-512 on a CPU, tinygemm on a GPU. Both compute in bfloat16.

Both dequantize as (code - 8) * scale + offset, with scale and offset in bfloat16; our (code - zero) * scale is the
same with offset = (8 - zero) * scale, up to the rounding of the offset.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows, gpu_unsupported


aten = torch.ops.aten


class _TorchInt4(PackedWeight):
    """What the two layouts share: bfloat16 activations, and scale and offset side by side as [groups, out, 2]."""

    name: ClassVar[str] = "torch_int4"
    bits: ClassVar[int] = 4

    codes: Tensor
    scales_and_offsets: Tensor

    def __init__(self, layer: LayerSpec, stored_rows: int) -> None:
        super().__init__(layer)
        self.activation_dtype = torch.bfloat16
        pairs = torch.zeros(layer.groups, stored_rows, 2, dtype=torch.bfloat16, device=layer.device)
        self.register_buffer("scales_and_offsets", pairs, persistent=False)  # [groups, stored_rows, 2]

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.activation_dtype not in (None, torch.bfloat16):
            return f"activation_dtype={layer.activation_dtype}, and only torch.bfloat16 is fast"
        return None

    def _store_scales_(self, to: slice, rows: QuantizedRows) -> None:
        assert rows.zeros is not None
        self.scales_and_offsets[:, to, 0] = rows.scales.T  # [groups, rows]
        self.scales_and_offsets[:, to, 1] = ((8 - rows.zeros) * rows.scales).T  # [groups, rows]


class TorchInt4Cpu(_TorchInt4):
    """`torch._weight_int4pack_mm_for_cpu`."""

    device_type: ClassVar[str] = "cpu"
    row_block: ClassVar[int] = 64  # the op packs blocks of 64 rows one after the other

    def __init__(self, layer: LayerSpec) -> None:
        stored_rows = -(-layer.out_features // 16) * 16  # the op wants a multiple of 16: rows of zeros follow
        super().__init__(layer, stored_rows)
        self.max_rows = _cpu_max_rows(layer.policy_dtype)
        codes = torch.empty(stored_rows, layer.in_features // 2, dtype=torch.uint8)
        self.register_buffer("codes", codes, persistent=False)  # [stored_rows, in/2], permuted in blocks of 64 rows

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        last_row = first_row + rows.codes.shape[0]
        codes = F.pad(rows.codes, (0, 0, 0, -last_row % 16)) if last_row % 16 else rows.codes  # [rows + padding, in]
        packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)  # the op cannot write in place
        self.codes[first_row : first_row + codes.shape[0]] = packed  # [rows + padding, in/2]
        self._store_scales_(slice(first_row, last_row), rows)

    def linear(self, x: Tensor) -> Tensor:
        y = aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.codes, self.layer.group, self.scales_and_offsets)
        return y[:, : self.layer.out_features]  # [m, out]


def _cpu_max_rows(policy_dtype: torch.dtype) -> int:
    """Rows of x up to which the CPU kernel beats `F.linear` in the policy's dtype.

    Measured with 2 threads on an Intel CPU with AMX, which speeds up dense bfloat16 alone, and on an AMD CPU without.
    """
    has_amx = torch.cpu._is_amx_tile_supported()
    if policy_dtype == torch.float64:
        return 64
    if policy_dtype == torch.float32:
        return 16 if has_amx else 64
    return 4 if has_amx else 16


class TorchInt4Cuda(_TorchInt4):
    """tinygemm, `torch._weight_int4pack_mm`, on NVIDIA GPUs from Ampere on."""

    device_type: ClassVar[str] = "cuda"
    row_block: ClassVar[int] = 8

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer, layer.out_features)
        self.max_rows = 16  # its cost grows with ceil(m / 16); "auto" measures
        # tinygemm loads 8, 4 or 2 tiles of 16 columns at once; every group size has at least 2
        self.inner_tiles = next(tiles for tiles in (8, 4, 2) if layer.in_features % (16 * tiles) == 0)
        shape = (layer.out_features // 8, layer.in_features // (16 * self.inner_tiles), 32, self.inner_tiles // 2)
        codes = torch.empty(shape, dtype=torch.int32, device=layer.device)  # [out/8, in/(16 tiles), 32, tiles/2]
        self.register_buffer("codes", codes, persistent=False)

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.out_features % 8:
            return f"{layer.out_features} output features are no multiple of 8"
        return super().unsupported(layer) or gpu_unsupported(layer, (8, 0))

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        last_row = first_row + rows.codes.shape[0]
        pairs = rows.codes[:, 0::2] * 16 + rows.codes[:, 1::2]  # [rows, in/2], the even column in the high nibble
        packed = aten._convert_weight_to_int4pack(pairs.to(torch.uint8), self.inner_tiles)
        self.codes[first_row // 8 : last_row // 8] = packed  # [rows/8, in/(16 tiles), 32, tiles/2]
        self._store_scales_(slice(first_row, last_row), rows)

    def linear(self, x: Tensor) -> Tensor:
        return aten._weight_int4pack_mm(x.contiguous(), self.codes, self.layer.group, self.scales_and_offsets)
