"""Products with the weights of a shadow: one class for linear layers; mixins for experts and activations. Products
that other modules compute themselves: `rewritten.py`.

Who multiplies is a field of a layer. On a CPU it is our C++, or oneDNN (`cpu_products.py`); in an exact shadow on CUDA
a kernel that sums in one order for every number of rows (`exact_sums.py`); else torch. Then a token's result does not
depend on the forward's other tokens, except by torch.

Autocast casts a wide weight in every product, or caches the cast of a trained weight. A captured forward would cast in
every replay. So the linear layers of a shadow have copies, equal bit for bit to the casts, which every generation
writes again, in place. Other modules read the weights: norms, embeddings and the residual stream stay wide, as under
autocast, and a quantized copy is made from the trained weights.
"""

import functools
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from ....native.cpu_products import by_registers, first_time, is_plain, is_readable, multiply
from ....quantization.experts import matrix_names, run_experts
from ....quantization.linear import PackedLayer
from ..kv.cache import autocast_dtype
from .exact_sums import experts_exactly, multiply_exactly
from .known_code import FAMILY
from .snapshot import patched_forward


FORWARDS = nn.Linear.forward, Conv1D.forward
"""Forwards that only multiply with a weight and add a bias; that of a subclass may use the weight otherwise."""
ACTIVATIONS = frozenset(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
"""Classes of activations of transformers."""


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
        is_transposed = isinstance(self, Conv1D)
        if self.routine == "native" and is_plain(x, weight, bias, is_transposed):
            return multiply(x, weight.T if is_transposed else weight, bias)
        if self.routine == "exact":
            y = multiply_exactly(x, weight.T if is_transposed else weight, bias)
            if y is not None:
                return y
        if not is_transposed:
            return F.linear(x, weight, bias)
        assert bias is not None
        return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


@functools.cache
def before(mixin: type, kind: type) -> type:
    """A subclass of `kind` with a mixin of this module before it."""
    return type(f"{mixin.__name__}Of{kind.__name__}", (mixin, kind), {})


def is_linear(kind: Any) -> bool:
    """Whether a class of modules has one of :data:`FORWARDS`."""
    return getattr(kind, "forward", None) in FORWARDS  # classes of torch.jit have none


class Experts(nn.Module):
    """A mixture's stacked experts one by one, each expert on the tokens that chose it; a mixin before their class."""

    routine: Literal["native", "exact"] = "native"

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Any:
        """x [tokens, hidden], chosen and shares [tokens, top_k] → [tokens, hidden]"""
        experts: Any = self
        names = matrix_names(self)
        # By attribute, for adapters of peft are parametrizations in its forward. Once, since reading computes them.
        weights = [getattr(experts, name) for name in names]  # [experts, out, in] or [experts, in, out]
        biases: list[Tensor | None] = [None, None]
        if experts.has_bias:
            biases = [getattr(experts, f"{name}_bias") for name in names]  # [experts, out]
        is_transposed = experts.is_transposed
        if self.routine != "native":
            y = experts_exactly(experts, x, chosen, shares, weights, biases)
            return super().forward(x, chosen, shares) if y is None else y
        is_like_first = is_readable(weights[1]) and weights[1].dtype == weights[0].dtype
        if not is_like_first or not is_plain(x, weights[0], biases[0], is_transposed):
            return super().forward(x, chosen, shares)

        def product(place: int, expert: int, x: Tensor) -> Tensor:
            weight, bias = weights[place][expert], biases[place]
            return multiply(x, weight.T if is_transposed else weight, None if bias is None else bias[expert])

        return run_experts(experts, x, chosen, shares, product)


def has_experts(kind: Any, module: nn.Module, exact: bool) -> bool:
    """Whether :class:`Experts` computes all of `module`, of class `kind`: on a CPU, or in an `exact` shadow."""
    is_ours = issubclass(kind, Experts) or vars(module).get("has_post_expert_norm")
    return (exact or is_on_cpu(module)) and _is_stacked(module) and not is_ours


def _is_stacked(module: nn.Module) -> bool:
    return "is_transposed" in vars(module) and "down_proj" in module._parameters  # transformers' experts interface


class Activation(nn.Module):
    """An activation of transformers by :func:`by_registers`; a mixin before its class."""

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape → the same shape"""
        return by_registers(super().forward, x)


def native_products(network: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Names, matrices [out, in] and products with them of what :func:`multiply` multiplies in `network`; of stacked
    matrices the first."""
    for name, module in network.named_modules():
        if isinstance(module, Product) and module.routine == "native":
            yield name, module.weight.T if isinstance(module, Conv1D) else module.weight, module
        is_ours = isinstance(module, Experts) or hasattr(module, FAMILY)
        for weight in module.parameters(recurse=False) if is_ours else ():
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


# ---- copies under autocast ------------------------------------------------------------------------------------------


_Key: TypeAlias = tuple[int, int]


def make_copies(shadow: PreTrainedModel) -> None:
    """Makes copies for the linear layers in the text decoder and head of `shadow`, in the dtype of the current
    autocast, if their weights have another one. Warns, once per model class, if most weights are in other layers."""
    dtype = autocast_dtype(shadow.device)
    if dtype is None:
        return
    made: dict[_Key, Copies] = {}
    for layer in _wide(shadow, dtype):
        if _key(layer) not in made:  # two layers may share their weights
            bias = None if layer.bias is None else torch.empty_like(layer.bias, dtype=dtype, requires_grad=False)
            made[_key(layer)] = Copies(torch.empty_like(layer.weight, dtype=dtype, requires_grad=False), bias)
        layer.copies = made[_key(layer)]
    refresh_copies(shadow)
    _warn_of_others(shadow, dtype)


@torch.no_grad()
def refresh_copies(shadow: PreTrainedModel) -> None:
    """Writes the current weights into the copies of `shadow`. Every generation does so, like autocast: version
    counters do not see writes through `.data`."""
    for layer in _with_copies(shadow).values():
        assert layer.copies is not None
        layer.copies.weight.copy_(layer.weight)
        if layer.copies.bias is not None and layer.bias is not None:
            layer.copies.bias.copy_(layer.bias)


def lend_copies(shadow: PreTrainedModel, network: PreTrainedModel) -> None:
    """Gives the layers of `network` the copies of `shadow`, where they have the same weights, until
    :func:`take_copies_back`. Without autocast there are none."""
    lent = _with_copies(shadow)
    for layer in _linear_layers(network) if lent else ():
        if _key(layer) in lent:
            layer.copies = lent[_key(layer)].copies


def take_copies_back(network: PreTrainedModel) -> None:
    """Makes the layers of `network` read their weights again."""
    for layer in _linear_layers(network):
        layer.copies = None


def bytes_of_copies(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Bytes that copies take for a shadow of `model` under autocast to `dtype`."""
    layers = {_key(layer): layer for layer in _wide(model, dtype)}
    weights = [weight for layer in layers.values() for weight in (layer.weight, layer.bias) if weight is not None]
    return sum(weight.numel() for weight in weights) * dtype.itemsize


def copied_bytes(shadow: PreTrainedModel) -> int:
    """Bytes of the copies that `shadow` has."""
    copies = [tensor for layer in _with_copies(shadow).values() for tensor in layer.copies or ()]
    return sum(tensor.nbytes for tensor in copies if tensor is not None)


def _with_copies(shadow: PreTrainedModel) -> dict[_Key, Product]:
    """One layer per copy of `shadow`."""
    return {_key(layer): layer for layer in _linear_layers(shadow) if layer.copies is not None}


def _key(layer: Any) -> _Key:
    return id(layer.weight), id(layer.bias)


def _wide(network: PreTrainedModel, dtype: torch.dtype) -> Iterator[Any]:
    """Linear layers whose weights autocast to `dtype` would cast."""
    return (layer for layer in _linear_layers(network) if _is_cast(layer.weight, dtype))


def _is_cast(weight: Tensor, dtype: torch.dtype) -> bool:
    is_plain = type(weight.data) is Tensor and weight.device.type != "meta"
    return is_plain and weight.is_floating_point() and weight.dtype not in (dtype, torch.float64)


def _linear_layers(network: PreTrainedModel) -> Iterator[Any]:
    """Linear layers of the text decoder and the head that compute as their classes do."""
    for part in _parts(network):
        yield from _below(part)


def _parts(network: PreTrainedModel) -> list[nn.Module]:
    parts = network.get_decoder(), network.get_output_embeddings()
    return [part for part in parts if part is not None]


def _below(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, PackedLayer):  # which runs the layer that it replaces where rows are many
        module = module.dense
    if isinstance(module, PreTrainedModel) and "text" not in module.input_modalities:
        return  # a vision tower, which does not run
    if is_known(module) and patched_forward(module) is None:
        yield module
    for child in module.children():
        yield from _below(child)


def is_known(module: nn.Module) -> bool:
    """Whether a module is a linear layer that has a weight, with which its forward only multiplies."""
    # Pruning and parametrizations compute the weight in every forward.
    is_known = isinstance(module, Product) or is_linear(type(module))
    return is_known and {"weight", "bias"} <= module._parameters.keys()


def weight_in_use(layer: Any) -> Tensor:
    """The weight that a linear layer multiplies with now, without gradient: under autocast its copy, if it has one."""
    copies = layer.copies if isinstance(layer, Product) else None
    use = copies is not None and copies.weight.dtype == autocast_dtype(layer.weight.device)
    weight: Tensor = copies.weight if copies is not None and use else layer.weight
    return weight


def _warn_of_others(shadow: PreTrainedModel, dtype: torch.dtype) -> None:
    copied = {id(layer.weight) for layer in _wide(shadow, dtype)}
    tables = {id(module.weight) for module in shadow.modules() if isinstance(module, nn.Embedding)}
    cast = {
        id(weight): weight.numel()
        for part in _parts(shadow)
        for weight in part.parameters()
        if weight.dim() > 1 and _is_cast(weight, dtype) and id(weight) not in tables - copied
    }
    others = sum(count for key, count in cast.items() if key not in copied)
    if others > sum(cast.values()) / 2 and first_time(f"weights of {type(shadow)} without copies"):
        name = str(dtype).removeprefix("torch.")
        warnings.warn(
            f"most weights of {type(shadow).__name__} are not {name} and belong to no linear layer, as stacked "
            f"experts do: under autocast to {name} each forward casts them, or computes in their dtype. Load it with "
            f'dtype={dtype}; in a trainer\'s config: model_init_kwargs={{"dtype": "{name}"}}.',
            stacklevel=2,
        )
