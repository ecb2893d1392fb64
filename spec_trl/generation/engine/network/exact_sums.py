"""Sums of exact shadows on CUDA: by kernels in which the bits of a token depend on that token alone.

Within :class:`ExactSums` products with a matrix and sums over a dimension are such, whoever calls them: a norm, a
router or a mixture. What it cannot replace, `exactness.py` names.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..cuda.kernels import run_on
from ..kv.cache import autocast_dtype


_DTYPES = torch.float32, torch.bfloat16, torch.float16  # of the kernels


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in _DTYPES and not torch.is_grad_enabled() and run_on(device)


def multiply_exactly(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x [..., in] times weight [out, in] plus bias [out], in the dtype that autocast gives them; None if the kernel
    cannot: with gradient, not on CUDA, or in several dtypes."""
    cast = autocast_dtype(x.device)
    dtype = cast or x.dtype
    if not _serves(x.device, dtype) or (cast is None and weight.dtype != dtype):
        return None
    from ..cuda.kernels.dense_product import dense_product  # imports Triton

    return dense_product(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def experts_exactly(
    experts: Any, x: Tensor, chosen: Tensor, shares: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor | None:
    """Of stacked `experts` those `chosen` by x `[tokens, hidden]`, times their `shares`, both `[tokens, top_k]`; a
    token adds them in their order. None as :func:`multiply_exactly`. The host does not wait for the device.

    Args:
        weights: two, `[experts, out, in]`, or `[experts, in, out]` where `experts.is_transposed`.
        biases: `[experts, out]` each, or None.
    """
    cast = autocast_dtype(x.device)
    dtype = cast or x.dtype
    if not _serves(x.device, dtype) or (cast is None and {weight.dtype for weight in weights} != {dtype}):
        return None
    from ..cuda.kernels.dense_product import expert_product  # imports Triton

    chosen, at = chosen.sort(dim=1)
    shares, top = shares.gather(1, at), chosen.shape[1]
    of_pairs, pairs = chosen.flatten().sort(stable=True)  # [tokens * top_k]
    starts = torch.searchsorted(of_pairs, torch.arange(len(weights[0]) + 1, device=x.device))

    def product(place: int, x: Tensor, sharing: int) -> Tensor:
        weight, bias = weights[place].to(dtype), biases[place]
        weight = weight.transpose(1, 2) if experts.is_transposed else weight
        bias = None if bias is None else bias.to(dtype).contiguous()
        return expert_product(x.to(dtype).contiguous(), weight, bias, pairs, starts, sharing)

    h = product(0, x, top)  # [tokens * top_k, 2 * inner]
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    parts = product(1, h, 1).unflatten(0, (-1, top)) * shares[..., None]  # [tokens, top_k, hidden]
    y = torch.zeros_like(x)
    for part in parts.to(x.dtype).unbind(1):
        y = y + part
    return y


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor | None:
    """As :func:`torch.sum`, over one dimension; None: the kernel cannot."""
    (dim,) = dim if isinstance(dim, list | tuple) and len(dim) == 1 else (dim,)
    if not isinstance(dim, int) or not _serves(x.device, x.dtype) or not x.dim():
        return None
    from ..cuda.kernels.dense_product import row_sum  # imports Triton

    total = row_sum(x.movedim(dim, -1)).to(dtype or x.dtype)
    return total.unsqueeze(dim) if keepdim else total


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor | None:
    total = _sum(x, dim, keepdim, torch.float32)
    return None if total is None else (total / (x.numel() // max(total.numel(), 1))).to(dtype or x.dtype)


def _matmul(x: Tensor, y: Tensor) -> Tensor | None:
    if y.dim() == 2:
        return multiply_exactly(x, y.T)
    # Angles of positions: one product each, which the kernels of some shapes would round to TF32.
    return x * y if x.shape[-1] == 1 and x.dtype == y.dtype and autocast_dtype(x.device) is None else None


def _bmm(x: Tensor, y: Tensor) -> Tensor | None:
    products = [multiply_exactly(*each) for each in zip(x, y.transpose(1, 2), strict=True)]
    found = [each for each in products if each is not None]
    return torch.stack(found) if len(found) == len(products) else None


_EXACT: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.linear: multiply_exactly, torch.bmm: _bmm, Tensor.bmm: _bmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.sum, Tensor.sum), _sum), **dict.fromkeys((torch.mean, Tensor.mean), _mean),
}  # fmt: skip

_KEYWORDS = {"dim", "keepdim", "dtype", "bias"}


class ExactSums(TorchFunctionMode):
    """Within it functions of torch with such a twin sum in one order, where its kernel can."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exactly, kwargs = _EXACT.get(function), kwargs or {}
        y = exactly(*args, **kwargs) if exactly is not None and kwargs.keys() <= _KEYWORDS else None
        return function(*args, **kwargs) if y is None else y
