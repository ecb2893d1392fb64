"""Dense layers of a shadow on a CPU."""

import torch
from torch import Tensor, nn


ONEDNN_MULTIPLICATIONS = 1 << 20
"""Multiplications of a layer's forward from which oneDNN takes less time (benchmarks/dense_linear.py, on an AMD EPYC).
Its call costs more than that of `F.linear`, whose library reads the weights once per row on some CPUs."""
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class DenseLinear(nn.Linear):
    """nn.Linear, which multiplies by oneDNN where that is faster: in float32 on a CPU, on the weights as they lie."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        if self._uses_onednn(x):
            return multiply_by_onednn(x, self.weight, self.bias)
        return super().forward(x)

    def _uses_onednn(self, x: Tensor) -> bool:
        return (
            x.numel() * self.out_features >= ONEDNN_MULTIPLICATIONS
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and not torch.is_grad_enabled()  # it has no backward pass
            and not torch.is_autocast_enabled("cpu")
            and self.weight.dtype == torch.float32
            and self.weight.is_contiguous()
        )


def is_dense_on_cpu(module: nn.Module) -> bool:
    """Whether a shadow should have a :class:`DenseLinear` for `module`."""
    return type(module) is nn.Linear and HAS_ONEDNN and module.weight.device.type == "cpu"


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times weight [out, in] → [..., out], as Inductor calls it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
