"""Dense layers of a shadow on a CPU."""

import torch
from torch import Tensor, nn

from . import cpu_products


PLAIN_MULTIPLICATIONS = 1 << 14
"""Multiplications below which `F.linear` runs: preparing another call would take longer. A guess."""
ONEDNN_MULTIPLICATIONS = 1 << 20
"""Multiplications of a layer's forward from which oneDNN takes less time (benchmarks/dense_linear.py, on an AMD EPYC).
Its call costs more than that of `F.linear`, whose library reads the weights once per row on some CPUs."""
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class DenseLinear(nn.Linear):
    """nn.Linear, which in float32 on a CPU multiplies few rows by :mod:`cpu_products`, and more by oneDNN where
    that is faster, on the weights as they lie."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        multiplications = x.numel() * self.out_features
        if multiplications < PLAIN_MULTIPLICATIONS or not self.is_plain(x):
            return super().forward(x)
        if cpu_products.serves(x.numel() // self.in_features):
            return cpu_products.multiply(cpu_products.dense_matrix(self.weight, self.bias), x)
        if HAS_ONEDNN and multiplications >= ONEDNN_MULTIPLICATIONS:
            return multiply_by_onednn(x, self.weight, self.bias)
        return super().forward(x)

    def is_plain(self, x: Tensor) -> bool:
        """Whether nothing but float32 is asked for."""
        return (
            x.dtype == torch.float32
            and x.device.type == "cpu"
            and not torch.is_grad_enabled()  # these have no backward pass
            and not torch.is_autocast_enabled("cpu")
            and self.weight.dtype == torch.float32
            and self.weight.is_contiguous()
        )


def is_dense_on_cpu(module: nn.Module) -> bool:
    """Whether a shadow should have a :class:`DenseLinear` for `module`."""
    return type(module) is nn.Linear and module.weight.device.type == "cpu"


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times weight [out, in] → [..., out], as Inductor calls it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
