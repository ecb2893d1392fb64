"""Layers with LoRA adapters of PEFT in a shadow on a GPU, without four kernels per layer.

Layers that share their input add what their adapters compute in one kernel, which reads the adapters' Parameters, or
under autocast their copies. Served is one active plain adapter per layer. The rest runs in PEFT's own forward: several
adapters, variants such as DoRA, biases, merged or switched-off adapters, hooks, gradients, float64, prompts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....quantization.linear import is_unwatched
from ....quantization.linear import project as project_packed
from ..kv.cache import autocast_dtype
from .products import is_known, weight_in_use


MOST_ROWS = 512
"""Of a verification. In prompts, which have more, launches take little of the time."""


class _Adapter(NamedTuple):
    """a and b of kernels/adapters.py, as PEFT names them."""

    low: Any
    high: Any
    scaling: float


class AdaptedLinear(nn.Module):
    """PEFT's LoRA layer around a linear layer; a mixin before its class."""

    base_layer: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """x [..., in] → y [..., out]"""
        y = None if args or kwargs else _add_adapters(x, [self], [_adapter_of(self)])
        return super().forward(x, *args, **kwargs) if y is None else y


def project(x: Tensor, *layers: Any) -> list[Tensor]:
    """:func:`~.project`, for layers of which some may have adapters."""
    adapters = [_watched_or_adapter(layer) for layer in layers]
    served = [place for place, adapter in enumerate(adapters) if adapter is not None]
    if len(served) < 2:
        return project_packed(x, *layers)
    joined = _add_adapters(x, [layers[place] for place in served], [adapters[place] for place in served])
    if joined is None:
        return project_packed(x, *layers)
    parts = iter(joined.split([layers[place].base_layer.out_features for place in served], dim=-1))
    return [layer(x) if adapter is None else next(parts) for layer, adapter in zip(layers, adapters, strict=True)]


def project_gated(x: Tensor, gate: Any, up: Any) -> Tensor | None:
    """silu(gate(x)) * up(x); None if a layer is not served."""
    adapters = [_watched_or_adapter(gate), _watched_or_adapter(up)]
    return None if None in adapters else _add_adapters(x, [gate, up], adapters, gated=True)


def only_multiplies(layer: Any) -> bool:
    """Whether a layer with an adapter gives its input to matrix products alone, for which autocast casts it."""
    return isinstance(layer, AdaptedLinear) and _adapter_of(layer) is not None


def _watched_or_adapter(layer: Any) -> _Adapter | None:
    return _adapter_of(layer) if isinstance(layer, AdaptedLinear) and is_unwatched(layer) else None


def _adapter_of(layer: Any) -> _Adapter | None:
    """The one adapter that PEFT's forward would add; None if that does more, or other things."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged or names[0] in layer.lora_variant:
        return None
    low, high, dropout = (modules[names[0]] for modules in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    drops = not isinstance(dropout, nn.Identity) and (dropout.training or type(dropout) is not nn.Dropout)
    casts = getattr(layer, "cast_input_dtype_enabled", True)
    if drops or not casts or low.bias is not None or high.bias is not None:
        return None
    products = layer.base_layer, low, high
    if not all(is_known(module) and is_unwatched(module) for module in products) or not is_unwatched(dropout):
        return None
    if any(module.weight.dtype == torch.float64 for module in products):
        return None
    return _Adapter(low, high, layer.scaling[names[0]])


def _add_adapters(x: Tensor, layers: list[Any], adapters: list[Any], gated: bool = False) -> Tensor | None:
    """Outputs of the layers side by side, or silu(gate) * up; None if the kernels do not serve them together."""
    if None in adapters or torch.is_grad_enabled() or not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return None
    from ..cuda.kernels.adapters import DTYPES, MOST_RANK, add_lora  # imports Triton

    low, high = ([weight_in_use(each[at]) for each in adapters] for at in range(2))
    wide = {weight.dtype for weight in (*low, *high)}
    bases = {layer.base_layer.weight.dtype for layer in layers}
    dtype = autocast_dtype(x.device) or low[0].dtype
    fits = len(wide) == len(bases) == 1 and not {x.dtype, *wide, *bases} - DTYPES.keys()
    rank = len(low[0])
    if not fits or rank > MOST_RANK or any(len(each) != rank or not each.is_contiguous() for each in low):
        return None
    if not all(each.is_contiguous() for each in high) or (gated and high[0].shape != high[1].shape):
        return None
    ys = [layer.base_layer(x).contiguous() for layer in layers]  # [..., out]
    return add_lora(x.contiguous(), ys, low, high, [each.scaling for each in adapters], dtype, gated)
