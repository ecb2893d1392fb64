"""The 8-bit kernel of torch core for CPUs, `torch._weight_int8pack_mm`: plain int8 rows, bfloat16 activations."""

import torch
from torch import Tensor

from .base import LayerSpec
from .reference import ReferenceInt8


MAX_ROWS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 16, torch.float64: 32}
"""Rows of x up to which the kernel beats `F.linear` in the policy's dtype (measured)."""


class TorchInt8Cpu(ReferenceInt8):
    """The reference's layout with a faster product."""

    name = "torch_int8"
    device_type = "cpu"
    activation_dtypes = (torch.bfloat16,)
    multiples = (1, 16)  # the op does not check: with others it returns garbage or crashes

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.max_rows = MAX_ROWS[layer.policy_dtype]

    def linear(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)  # [m, out]
