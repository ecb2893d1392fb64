"""Marlin (Frantar et al. 2024), in the edition of vLLM that `gptqmodel` carries as source: an optional extra.

The layout, for tiles of 16 columns and 64 rows of the weight:

    codes   int32 [in / 16, 2 * stored_rows]: per tile 128 words, word (row % 8, column % 8 // 2, row // 16), of which
            nibble 4 * (column % 2) + 2 * (row // 8 % 2) + column // 8 is the code; row and column within the tile
    scales  [groups, stored_rows]: of 64 rows, those with the same row % 8 lie together
    zeros   int32 [groups, stored_rows / 8]: permuted like the scales, then 8 to a word in the order 0 2 4 6 1 3 5 7

This is what the four lanes of a tensor-core fragment want to load. Rows are padded with scale 0.
"""

import importlib.util
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows, gpu_unsupported, join_nibbles, permute_scales


INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)  # the order in which zero points fill a word


class MarlinInt4(PackedWeight):
    """`gptq_marlin_gemm_bf16` with integer zero points; sums in fp32."""

    name: ClassVar[str] = "marlin"
    bits: ClassVar[int] = 4
    device_type: ClassVar[str] = "cuda"
    row_block: ClassVar[int] = 64
    package: ClassVar[str] = "gptqmodel"

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        if layer.device.type == "cuda":
            from .marlin_mm import load_marlin

            load_marlin()
        self.max_rows = 16
        self.activation_dtype = torch.bfloat16
        device = layer.device
        # The kernel's tiles are 64 rows by 128 columns or 128 rows by 64 columns.
        tile = 64 if layer.in_features % 128 == 0 else 128
        stored = -(-layer.out_features // tile) * tile
        codes = torch.zeros(layer.in_features // 16, 2 * stored, dtype=torch.int32, device=device)
        scales = torch.zeros(layer.groups, stored, dtype=torch.bfloat16, device=device)
        zeros = torch.zeros(layer.groups, stored // 8, dtype=torch.int32, device=device)
        # The kernel's programs count in it who came last; it is 0 again after each call.
        programs = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 128
        workspace = torch.zeros(max(programs, 128), dtype=torch.int32, device=device)
        self.register_buffer("codes", codes, persistent=False)  # [in/16, 2 stored_rows]
        self.register_buffer("scales", scales, persistent=False)  # [groups, stored_rows]
        self.register_buffer("zeros", zeros, persistent=False)  # [groups, stored_rows/8]
        self.register_buffer("workspace", workspace, persistent=False)  # [programs]

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    workspace: Tensor

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.activation_dtype not in (None, torch.bfloat16):
            return f"activation_dtype={layer.activation_dtype}, and only torch.bfloat16 is offered"
        if layer.in_features % 64:
            return f"{layer.in_features} input features are no multiple of 64"
        if layer.groups == 1:  # then the layout of the scales is another one
            return "a row is a single group"
        if importlib.util.find_spec("gptqmodel_ext") is None:
            return 'gptqmodel, which carries its source, is not installed; "pip install spec-trl[marlin]"'
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            return "nvcc, which compiles it, is not found; install the CUDA toolkit or set CUDA_HOME"
        return gpu_unsupported(layer, (8, 0))

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        assert rows.zeros is not None
        padding = -rows.codes.shape[0] % 64
        codes = F.pad(rows.codes, (0, 0, 0, padding)) if padding else rows.codes  # [rows, in]
        first, last = first_row, first_row + codes.shape[0]
        self.codes[:, 2 * first : 2 * last] = marlin_codes(codes)  # [in/16, 2 rows]
        self.scales[:, first:last] = permute_scales(F.pad(rows.scales, (0, 0, 0, padding)))  # [groups, rows]
        zeros = permute_scales(F.pad(rows.zeros, (0, 0, 0, padding))).int()  # [groups, rows]
        self.zeros[:, first // 8 : last // 8] = join_nibbles([zeros[:, i::8] for i in INTERLEAVED])  # [groups, rows/8]

    def linear(self, x: Tensor) -> Tensor:
        y = torch.ops.spec_trl.marlin_int4_mm(x.contiguous(), self.codes, self.scales, self.zeros, self.workspace)
        return y[:, : self.layer.out_features]  # [m, out]


def marlin_codes(codes: Tensor) -> Tensor:
    """int32 [rows, in] of codes → int32 [in/16, 2 rows] of words; 64 divides the rows and 16 the columns."""
    rows, columns = codes.shape
    # row = 64 tile + 16 warp + 8 b + lane row; column = 16 tile + 8 c + 2 lane column + a
    parts = codes.view(rows // 64, 4, 2, 8, columns // 16, 2, 4, 2)  # [tiles, warp, b, row, tiles, c, column, a]
    nibbles = [parts[:, :, b, :, :, c, :, a] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    words = join_nibbles(nibbles)  # [row tiles, warp, lane row, column tiles, lane column]
    return words.permute(3, 0, 2, 4, 1).reshape(columns // 16, 2 * rows)  # [in/16, 2 rows]
