"""Copies of float32 weights of a shadow's linear layers, in autocast's dtype.

Autocast casts a wide weight in every product, or caches the cast of a trained weight. A captured forward would cast in
every replay. So the linear layers of a shadow have copies, equal bit for bit to the casts, which every generation
writes again, in place. Other modules read the weights: norms, embeddings and the residual stream stay wide, as under
autocast, and a quantized copy is made from the trained weights.
"""

import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....quantization.linear import PackedLayer
from ..kv.cache import autocast_dtype
from .products import Copies, Product, is_linear
from .training_marks import patched_forward


warned: set[type] = set()
"""Classes of models for which this process has warned that most of their weights have no copies."""


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
    """Whether a module is a linear layer whose forward only multiplies with its weight."""
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
    if others > sum(cast.values()) / 2 and type(shadow) not in warned:
        warned.add(type(shadow))
        name = str(dtype).removeprefix("torch.")
        warnings.warn(
            f"most weights of {type(shadow).__name__} are not {name} and belong to no linear layer, as stacked "
            f"experts do: under autocast to {name} each forward casts them, or computes in their dtype. Load it with "
            f'dtype={dtype}; in a trainer\'s config: model_init_kwargs={{"dtype": "{name}"}}.',
            stacklevel=2,
        )
