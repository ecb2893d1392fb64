"""Marlin (Frantar et al. 2024), in the edition of vLLM that `gptqmodel` carries as source: an optional extra.

This file is the layout. For each tile of 16 columns and 64 rows of the weight, the codes are 128 words: word
(row % 8, column % 8 // 2, row // 16), of which nibble 4 * (column % 2) + 2 * (row // 8 % 2) + column // 8 is the code;
row and column within the tile.
"""

import torch
from torch import Tensor

from .base import LayerSpec, Package, join_nibbles
from .fragments import FragmentInt4


class MarlinInt4(FragmentInt4):
    """`gptq_marlin_gemm_bf16` with integer zero points; sums in fp32."""

    name = "marlin"
    package = Package("gptqmodel", "gptqmodel_ext", "spec-trl[marlin]")
    multiples = (1, 64)
    zero_order = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, layer: LayerSpec) -> None:
        programs = 128
        if layer.device.type == "cuda":
            from .marlin_mm import load_marlin

            load_marlin()
            programs = max(programs, torch.cuda.get_device_properties(layer.device).multi_processor_count)
        # The kernel's tiles are 64 rows by 128 columns or 128 rows by 64 columns.
        tile = 64 if layer.in_features % 128 == 0 else 128
        super().__init__(layer, -(-layer.out_features // tile) * tile, locks=programs)

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.groups == 1:  # then the layout of the scales is another one
            return "a row is a single group"
        reason = super().unsupported(layer)
        if reason is None:
            from torch.utils.cpp_extension import CUDA_HOME

            if CUDA_HOME is None:
                return "nvcc, which compiles it, is not found; install the CUDA toolkit or set CUDA_HOME"
        return reason

    def order_codes(self, codes: Tensor) -> Tensor:
        rows, columns = codes.shape
        # row = 64 tile + 16 warp + 8 b + lane row; column = 16 tile + 8 c + 2 lane column + a
        parts = codes.view(rows // 64, 4, 2, 8, columns // 16, 2, 4, 2)  # [tiles, warp, b, row, tiles, c, column, a]
        nibbles = [parts[:, :, b, :, :, c, :, a] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
        words = join_nibbles(nibbles)  # [row tiles, warp, lane row, column tiles, lane column]
        return words.permute(3, 0, 2, 4, 1).reshape(columns // 16, 2 * rows)  # [in/16, 2 rows]

    def linear(self, x: Tensor) -> Tensor:
        y = torch.ops.spec_trl.marlin_int4_mm(x.contiguous(), self.codes, self.scales, self.zeros, self.locks)
        return y[:, : self.layer.out_features]  # [m, out]
