"""The 8-bit kernel of torch core for CPUs, `torch._weight_int8pack_mm`: plain int8 rows, bfloat16 activations."""

from typing import ClassVar

import torch
from torch import Tensor

from .base import LayerSpec, PackedWeight, QuantizedRows


# Rows of x up to which the kernel beats `F.linear` in the policy's dtype (measured).
MAX_ROWS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 16, torch.float64: 32}


class TorchInt8Cpu(PackedWeight):
    """One signed byte per weight, one scale per row."""

    name: ClassVar[str] = "torch_int8"
    bits: ClassVar[int] = 8
    device_type: ClassVar[str] = "cpu"
    row_block: ClassVar[int] = 1

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.max_rows = MAX_ROWS[layer.policy_dtype]
        self.activation_dtype = torch.bfloat16
        shape, device = (layer.out_features, layer.in_features), layer.device
        self.register_buffer("codes", torch.empty(shape, dtype=torch.int8, device=device), persistent=False)
        scales = torch.empty(layer.out_features, dtype=torch.bfloat16, device=device)  # [out]
        self.register_buffer("scales", scales, persistent=False)

    codes: Tensor
    scales: Tensor

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        if layer.in_features % 16:  # the op does not check: it returns garbage or crashes
            return f"{layer.in_features} input features are no multiple of 16"
        if layer.activation_dtype not in (None, torch.bfloat16):
            return f"activation_dtype={layer.activation_dtype}, and only torch.bfloat16 is fast"
        return None

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        to = slice(first_row, first_row + rows.codes.shape[0])
        self.codes[to] = rows.codes  # [rows, in]
        self.scales[to] = rows.scales[:, 0]  # [rows]

    def linear(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)  # [m, out]
