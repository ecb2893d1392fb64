"""Dense layers of a shadow that is exact on CUDA: one order of summation for every number of rows."""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .attention import takes_spans
from .cache import autocast_dtype


class ExactLinear(nn.Linear):
    """nn.Linear, whose rows do not depend on the rows beside them."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        own = multiply(x, self.weight, self.bias)
        return super().forward(x) if own is None else own


class ExactConv1D(Conv1D):
    """GPT-2's layer likewise; its weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        own = multiply(x, self.weight.t(), self.bias)
        result: Tensor = super().forward(x) if own is None else own
        return result


_KINDS: dict[type, type] = {nn.Linear: ExactLinear, Conv1D: ExactConv1D}


def exact_kind(kind: type) -> type:
    """The class that a layer of class `kind` has in an exact shadow."""
    return _KINDS.get(kind, kind)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x [..., in] times weight [out, in] plus bias [out], in the dtype that autocast gives x; None where the kernel
    cannot: with gradient, not on CUDA, or in another dtype than that of the weight."""
    dtype = autocast_dtype(x.device) or x.dtype
    if torch.is_grad_enabled() or weight.dtype != dtype or not takes_spans(x.device, dtype):
        return None
    from .kernels.dense_product import dense_product  # imports Triton

    return dense_product(x.to(dtype), weight, bias)
