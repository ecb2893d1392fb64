"""Products with the weights of a shadow: one class for linear layers; mixins for experts, routers and activations.

Who multiplies is a field of a layer. On a CPU it is our C++, or oneDNN (`cpu_products.py`); in an exact shadow on CUDA
a kernel that sums in one order for every number of rows; else torch. Then a token's result does not depend on the
forward's other tokens, except by torch.
"""

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from ....native.cpu_products import by_registers, is_plain, is_readable, multiply
from ....quantization.experts import matrix_names, run_experts
from ..cuda.kernels import run_on
from ..kv.cache import autocast_dtype


FORWARDS = nn.Linear.forward, Conv1D.forward
"""Forwards that only multiply with a weight and add a bias; that of a subclass may use the weight otherwise."""
EXACT_DTYPES = torch.float32, torch.bfloat16, torch.float16
"""Dtypes of the exact kernel."""
_ACTIVATIONS = frozenset(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())


class Copies(NamedTuple):
    """Copies of the weight of a linear layer and of its bias, in the dtype of autocast."""

    weight: Tensor
    bias: Tensor | None


class Product(nn.Module):
    """A linear layer of a shadow; a mixin before nn.Linear, or before Conv1D, whose weight is [in, out].

    Attributes:
        routine: who multiplies; torch does what this cannot, such as gradients.
        copies: read instead of the weights under their autocast and without gradient; None: there are none.
    """

    weight: Tensor
    bias: Tensor | None
    is_transposed: bool
    routine: Literal["torch", "native", "exact"] = "torch"
    copies: Copies | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        copies = self.copies
        if (
            copies is None
            or torch.is_grad_enabled()
            or autocast_dtype(x.device) != copies.weight.dtype
            or "weight" not in self._parameters  # peft's ParamWrapper parametrizes the weight during its forward
        ):
            weight, bias = self.weight, self.bias
        else:
            weight, bias = copies
        if self.routine == "native" and is_plain(x, weight, bias, self.is_transposed):
            return multiply(x, weight.T if self.is_transposed else weight, bias)
        if self.routine == "exact":
            y = multiply_exactly(x, weight.T if self.is_transposed else weight, bias)
            if y is not None:
                return y
        if not self.is_transposed:
            return F.linear(x, weight, bias)
        assert bias is not None
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


def multiply_exactly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x [..., in] times weight [out, in] plus bias [out], in the dtype that autocast gives x; None if the kernel
    cannot: with gradient, not on CUDA, or in another dtype than that of the weight."""
    dtype = autocast_dtype(x.device) or x.dtype
    if torch.is_grad_enabled() or weight.dtype != dtype or dtype not in EXACT_DTYPES or not run_on(x.device):
        return None
    from ..cuda.kernels.dense_product import dense_product  # imports Triton

    return dense_product(x.to(dtype), weight, bias)


def product_class(kind: type) -> type:
    """:class:`Product` before `kind`, a class with one of :data:`FORWARDS`."""
    return _before(Product, kind, is_transposed=issubclass(kind, Conv1D))


@functools.cache
def _before(mixin: type, kind: type, **members: object) -> type:
    return type(f"{mixin.__name__}Of{kind.__name__}", (mixin, kind), members)


def is_linear(kind: Any) -> bool:
    """Whether a class of modules has one of :data:`FORWARDS`."""
    return getattr(kind, "forward", None) in FORWARDS  # classes of torch.jit have none


class Experts(nn.Module):
    """A mixture's stacked experts one by one, each expert on the tokens that chose it; a mixin before their class."""

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [tokens, hidden], chosen and shares [tokens, top_k] → [tokens, hidden]"""
        experts: Any = self
        names = matrix_names(self)
        # By attribute, for adapters of peft are parametrizations in its forward. Once, since reading computes them.
        weights = [getattr(experts, name) for name in names]  # [experts, out, in] or [experts, in, out]
        biases: list[Tensor | None] = [None, None]
        if experts.has_bias:
            biases = [getattr(experts, f"{name}_bias") for name in names]  # [experts, out]
        is_transposed = experts.is_transposed
        is_like_first = is_readable(weights[1]) and weights[1].dtype == weights[0].dtype
        if not is_like_first or not is_plain(x, weights[0], biases[0], is_transposed):
            y: Tensor = super().forward(x, chosen, shares)
            return y

        def product(place: int, expert: int, x: Tensor) -> Tensor:
            weight, bias = weights[place][expert], biases[place]
            return multiply(x, weight.T if is_transposed else weight, None if bias is None else bias[expert])

        return run_experts(experts, x, chosen, shares, product, NativeProducts())


def has_experts(kind: Any, module: nn.Module) -> bool:
    """Whether `module`, on a CPU, has the experts interface of transformers, and :class:`Experts` computes all of
    it."""
    has = is_on_cpu(module) and "is_transposed" in vars(module) and "down_proj" in module._parameters
    return has and not issubclass(kind, Experts) and not vars(module).get("has_post_expert_norm")


_MATMULS = torch.matmul, Tensor.matmul, Tensor.__matmul__
_SIGMOIDS = torch.sigmoid, Tensor.sigmoid, F.sigmoid


class NativeProducts(TorchFunctionMode):
    """Within it products with a matrix are those of :func:`multiply`, and sigmoids those of :func:`by_registers`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and not kwargs and is_plain(*args):
            return multiply(args[0], args[1], args[2] if len(args) > 2 else None)
        if function in _MATMULS and len(args) == 2 and args[1].dim() == 2 and is_plain(args[0], args[1].T):
            return multiply(args[0], args[1].T, None)
        if function is torch.bmm and len(args) == 2 and is_plain(args[0], args[1], transposed=True):
            return torch.stack([multiply(x, weight.T, None) for x, weight in zip(*args, strict=True)])
        if function in _SIGMOIDS and len(args) == 1:
            return by_registers(function, args[0])
        return function(*args, **(kwargs or {}))


class Matrices(nn.Module):
    """A module of transformers with matrices and a forward that is no linear layer's, such as a router; a mixin before
    its class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with NativeProducts():
            return super().forward(*args, **kwargs)


def has_matrices(kind: Any, module: nn.Module) -> bool:
    """Whether :class:`Matrices` serves `module`, on a CPU, of class `kind`."""
    has = any(weight is not None and weight.dim() in (2, 3) for weight in module._parameters.values())
    is_theirs = kind.__module__.startswith("transformers.") and not isinstance(module, nn.Embedding)
    is_experts = "is_transposed" in vars(module) and "down_proj" in module._parameters
    return has and is_theirs and not is_experts and not is_linear(kind) and is_on_cpu(module)


class Activation(nn.Module):
    """An activation of transformers by :func:`by_registers`; a mixin before its class."""

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape → the same shape"""
        return by_registers(super().forward, x)


def is_activation(kind: Any) -> bool:
    """Whether `kind` is the class of an activation of transformers."""
    return kind in _ACTIVATIONS


experts_class, matrices_class = partial(_before, Experts), partial(_before, Matrices)
activation_class = partial(_before, Activation)


def native_products(network: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Names, matrices [out, in] and products with them of what :func:`multiply` multiplies in `network`; of stacked
    matrices the first."""
    for name, module in network.named_modules():
        if isinstance(module, Product) and module.routine == "native":
            yield name, module.weight.T if module.is_transposed else module.weight, module
        for weight in module.parameters(recurse=False) if isinstance(module, Experts | Matrices) else ():
            if weight.dim() in (2, 3):
                matrix = weight[0] if weight.dim() == 3 else weight
                matrix = matrix.T if getattr(module, "is_transposed", False) else matrix
                # Not where autocast casts.
                if is_plain(matrix.new_empty(1, matrix.shape[1]), matrix.T, transposed=True):
                    yield name, matrix, partial(multiply, weight=matrix, bias=None)


def is_on_cpu(module: nn.Module) -> bool:
    """Whether the first weight of `module` itself, if any, is on a CPU."""
    weight = next((weight for weight in module._parameters.values() if weight is not None), None)
    return weight is not None and weight.device.type == "cpu"
