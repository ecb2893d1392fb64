"""Linear layers of a shadow: exact ones on CUDA, and copies of float32 weights in autocast's dtype.

An exact layer sums in one order for every number of rows.

Autocast casts a wide weight in every product, or caches the cast of a trained weight. A captured forward would cast in
every replay. So the linear layers of a shadow have copies, equal bit for bit to the casts, which every generation
writes again, in place. Other modules read the weights: norms, embeddings and the residual stream stay wide, as under
autocast, and a quantized copy is made from the trained weights.
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ....native.cpu_products import DenseConv1D, DenseLinear, is_plain, multiply
from ....once import first_time
from ....quantization.linear import PackedLayer
from ..kv.cache import autocast_dtype
from .attention import takes_spans
from .snapshot import patched_forward


class ExactLinear(nn.Linear):
    """nn.Linear with rows that do not depend on other rows."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        product = multiply_exactly(x, self.weight, self.bias)
        return super().forward(x) if product is None else product


class ExactConv1D(Conv1D):
    """The same for GPT-2's layer; its weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        product = multiply_exactly(x, self.weight.t(), self.bias)
        result: Tensor = super().forward(x) if product is None else product
        return result


_KINDS: dict[type, type] = {nn.Linear: ExactLinear, Conv1D: ExactConv1D}


def exact_kind(kind: type) -> type:
    """The class that a layer of class `kind` has in an exact shadow."""
    return _KINDS.get(kind, kind)


def multiply_exactly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x [..., in] times weight [out, in] plus bias [out], in the dtype that autocast gives x; None if the kernel
    cannot: with gradient, not on CUDA, or in another dtype than that of the weight."""
    dtype = autocast_dtype(x.device) or x.dtype
    if torch.is_grad_enabled() or weight.dtype != dtype or not takes_spans(x.device, dtype):
        return None
    from ..cuda.kernels.dense_product import dense_product  # imports Triton

    return dense_product(x.to(dtype), weight, bias)


class Copies(NamedTuple):
    """Copies of the weight of a linear layer and of its bias."""

    weight: Tensor
    bias: Tensor | None


class NarrowProduct(nn.Module):
    """A linear layer of a shadow, which reads copies of its weights, if any, under their autocast and without
    gradient."""

    weight: Tensor
    bias: Tensor | None
    copies: Copies | None = None
    _is_transposed: bool
    _is_exact: bool

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out]"""
        copies = self.copies
        if copies is not None and "weight" not in self._parameters:
            copies = None  # peft's ParamWrapper parametrizes the weight during its forward
        if copies is None or torch.is_grad_enabled() or autocast_dtype(x.device) != copies.weight.dtype:
            product: Tensor = super().forward(x)
            return product
        weight = copies.weight.T if self._is_transposed else copies.weight  # [out, in]
        if self._is_exact and (exact := multiply_exactly(x, weight, copies.bias)) is not None:
            return exact
        if is_plain(x, *copies, transposed=self._is_transposed):
            return multiply(x, weight, copies.bias)
        if not self._is_transposed:
            return F.linear(x, *copies)
        assert copies.bias is not None
        rows = torch.addmm(copies.bias, x.reshape(-1, x.shape[-1]), copies.weight)  # [m, out]
        return rows.view(*x.shape[:-1], -1)


# By the forward of a class (another forward may use the weight differently): whether the weight is transposed, and the
# layer exact.
_LAYERS = {
    nn.Linear.forward: (False, False), DenseLinear.forward: (False, False), ExactLinear.forward: (False, True),
    Conv1D.forward: (True, False), DenseConv1D.forward: (True, False), ExactConv1D.forward: (True, True),
}  # fmt: skip
_classes: dict[type, type] = {}  # class with copies, by class without
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
        _give(layer, made[_key(layer)])
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
            _give(layer, lent[_key(layer)].copies)


def take_copies_back(network: PreTrainedModel) -> None:
    """Makes the layers of `network` read their weights again."""
    for layer in _linear_layers(network):
        if isinstance(layer, NarrowProduct):
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


def _with_copies(shadow: PreTrainedModel) -> dict[_Key, NarrowProduct]:
    """One layer per copy of `shadow`."""
    layers = (layer for layer in _linear_layers(shadow) if isinstance(layer, NarrowProduct))
    return {_key(layer): layer for layer in layers if layer.copies is not None}


def _give(layer: Any, copies: Copies | None) -> None:
    kind = type(layer)
    if not isinstance(layer, NarrowProduct):
        if kind not in _classes:
            is_transposed, is_exact = _LAYERS[kind.forward]
            members = {"_is_transposed": is_transposed, "_is_exact": is_exact}
            _classes[kind] = type(f"Narrow{kind.__name__}", (NarrowProduct, kind), members)
        layer.__class__ = _classes[kind]  # no other tree has the modules of a shadow
    layer.copies = copies


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
    """Whether the class of a module is a linear layer whose forward only multiplies with its weight."""
    is_known = isinstance(module, NarrowProduct) or type(module).forward in _LAYERS
    # Pruning and parametrizations compute the weight in every forward.
    return is_known and {"weight", "bias"} <= module._parameters.keys()


def weight_in_use(layer: Any) -> Tensor:
    """The weight that a linear layer multiplies with now, without gradient: under autocast its copy, if it has one."""
    copies = layer.copies if isinstance(layer, NarrowProduct) else None
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
