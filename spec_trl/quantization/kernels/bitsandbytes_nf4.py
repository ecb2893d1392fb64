"""Multiplies NF4 weights by bitsandbytes, an optional extra.

On a CPU 32 rows are stored together. A pair of their columns has 32 bytes:

    byte i of column pair j  =  row i // 2, column 2j + i % 2  |  row 16 + i // 2, same column << 4      i = 0 … 31
"""

import torch
from torch import Tensor

from .base import LayerSpec, Package, PackedWeight, QuantizedRows, normal_floats


BITSANDBYTES = Package("bitsandbytes", "bitsandbytes", "spec-trl[bitsandbytes]")


class BitsAndBytesNF4Cpu(PackedWeight):
    """`bitsandbytes::gemv_4bit`, in bfloat16, for several rows too."""

    name = "bitsandbytes"
    bits = 4
    normal_float = True
    device_type = "cpu"
    package = BITSANDBYTES
    activation_dtypes = (torch.bfloat16,)
    multiples = (32, 64)  # with others the operator returns garbage
    row_block = 32

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        import bitsandbytes  # noqa: F401, registers the operators

        out, columns = layer.out_features, layer.in_features
        # Most rows of x with a gain over the dense layer of a policy in this dtype, of those measured (1 to
        # 64), with AVX-512 and without AMX.
        self.max_rows = 64 if layer.policy_dtype in (torch.float32, torch.float64) else 8
        self.codes = self.allocate(out // 32, columns // 2, 32, dtype=torch.uint8)  # [out/32, in/2, 32]
        self.scales = self.allocate(layer.groups, out, dtype=torch.bfloat16)  # [groups, out]

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        # Elsewhere the operator unpacks the whole weight for each product.
        lacks = not torch.cpu._is_avx512_bf16_supported()
        return "the CPU lacks AVX-512 for bfloat16" if lacks else super().unsupported(layer)

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        halves = rows.codes.view(-1, 2, 16, self.layer.in_features // 2, 2)  # [rows/32, 2, 16, in/2, 2]
        packed = halves[:, 0] + halves[:, 1] * 16  # [rows/32, 16, in/2, 2]
        first = first_row // 32
        self.codes[first : first + len(packed)] = packed.transpose(1, 2).flatten(2)  # [rows/32, in/2, 32]
        self.scales[:, first_row : first_row + len(rows.scales)] = rows.scales.T  # [groups, rows]

    def linear(self, x: Tensor) -> Tensor:
        layer = self.layer
        shape, levels = [layer.out_features, layer.in_features], normal_floats(torch.float32, layer.device)
        return torch.ops.bitsandbytes.gemv_4bit(x.contiguous(), self.codes, shape, self.scales, levels, layer.group)


class BitsAndBytesNF4Cuda(PackedWeight):
    """`bitsandbytes::gemm_4bit`; of two codes in a byte the first is in the high half."""

    name = "bitsandbytes"
    bits = 4
    normal_float = True
    device_type = "cuda"
    package = BITSANDBYTES
    activation_dtypes = (torch.bfloat16,)
    rows_along = {"codes": 0, "scales": 0}

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        import bitsandbytes  # noqa: F401, registers the operators

        self.codes = self.allocate(layer.out_features, layer.in_features // 2, dtype=torch.uint8)  # [out, in/2]
        self.scales = self.allocate(layer.out_features, layer.groups, dtype=torch.float32)  # [out, groups]

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        to = slice(first_row, first_row + len(rows.codes))
        torch.add(rows.codes[:, 1::2], rows.codes[:, 0::2], alpha=16, out=self.codes[to])  # [rows, in/2]
        self.scales[to] = rows.scales  # [rows, groups]

    def linear(self, x: Tensor) -> Tensor:
        layer = self.layer
        shape = [layer.out_features, layer.in_features]
        return torch.ops.bitsandbytes.gemm_4bit(x.contiguous(), self.codes, shape, self.scales, layer.group, "nf4")
