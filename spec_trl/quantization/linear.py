"""Replaces a projection in the drafter; packed experts share its base class."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .awq import ActivationAware, ChannelStatistics
from .kernels import PackedWeight
from .kernels.base import join_rows
from .rtn import computing_dtype
from .source_weight import is_adapter, read_projection, under_adapters


class PackedLayer(nn.Module, ABC):
    """Multiplies with packed weights if rows are few, and runs the replaced layer if they are many.

    The replaced layer is outside of the module tree, to protect the policy's weights from `.to()`, `.train()` and
    `.requires_grad_()` on the drafter.

    Attributes:
        called: whether the layer ran since the last refresh (replayed CUDA graphs do not count).
        passes_gradient: whether gradients pass (a learning drafter): packed weights then serve any number of rows.
    """

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self._dense = (dense,)  # a tuple, so that nn.Module does not register it
        self.called = False
        self.passes_gradient = False

    @property
    def dense(self) -> Any:
        """The replaced layer."""
        return self._dense[0]

    @property
    @abstractmethod
    def packed_weights(self) -> list[PackedWeight]:
        """The packed weights, at least one; their buffers never move."""

    @property
    def weight_count(self) -> int:
        return sum(packed.layer.in_features * packed.layer.out_features for packed in self.packed_weights)

    @property
    def max_rows(self) -> int:
        """Most rows that use packed weights."""
        return self.packed_weights[0].max_rows

    @property
    def packed_bytes(self) -> int:
        return sum(packed.nbytes for packed in self.packed_weights)

    @abstractmethod
    def refresh(self, quantizer: ActivationAware, activations: ChannelStatistics | None = None) -> None:
        """Quantizes the present weights into the same buffers; without `activations` rounded to nearest."""


class QuantizedLinear(PackedLayer):
    """y = (x * inverse_scales) @ packedᵀ + bias, for few rows of x; the replaced layer itself, unscaled, for many.

    With `passes_gradient` gradients reach x as through the replaced layer: kernels compute none.

    Args:
        packed: an empty packed weight of its shape.
        activation_aware: whether to scale the input channels by `inverse_scales` [in] (AWQ).
    """

    merged_bias: Tensor | None
    inverse_scales: Tensor | None
    joined: "JoinedWeight | None" = None
    place = 0  # in it

    def __init__(self, dense: nn.Module, packed: PackedWeight, activation_aware: bool = False) -> None:
        super().__init__(dense)
        self.packed = packed
        self.in_features, self.out_features = packed.layer.in_features, packed.layer.out_features
        # Adapters may train a bias too: then the merged bias is a copy, made with the merged weight.
        self.has_adapter = is_adapter(dense)
        bias = under_adapters(dense).bias
        merged_bias = bias.detach().clone() if self.has_adapter and bias is not None else None  # [out]
        self.register_buffer("merged_bias", merged_bias, persistent=False)
        inverse_scales = None
        if activation_aware:
            # In the quantizer's dtype: the product with x is then rounded once, to the kernel's dtype.
            dtype = computing_dtype(packed.layer.policy_dtype)
            inverse_scales = torch.ones(self.in_features, dtype=dtype, device=packed.layer.device)  # [in]
        self.register_buffer("inverse_scales", inverse_scales, persistent=False)

    @property
    def packed_weights(self) -> list[PackedWeight]:
        return [self.packed]

    @property
    def weight(self) -> Tensor:
        """The replaced layer's weight, because some models read a projection's `weight.dtype`."""
        return self.dense.weight

    @property
    def packed_bytes(self) -> int:
        return super().packed_bytes + (0 if self.inverse_scales is None else self.inverse_scales.nbytes)

    def refresh(self, quantizer: ActivationAware, activations: ChannelStatistics | None = None) -> None:
        weight, bias = read_projection(self.dense)
        if self.inverse_scales is None:
            quantizer.quantize_(weight, self.packed)
        else:
            quantizer.quantize_scaled_(weight, self.packed, self.inverse_scales, activations)
        if self.merged_bias is not None and bias is not None:
            self.merged_bias.copy_(bias)  # [out]
        self.called = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → y [..., out], in the dtype of the replaced layer's results."""
        y = self._multiply(x)
        if self.passes_gradient and x.requires_grad and torch.is_grad_enabled():
            dense = self.dense(x)  # [..., out]
            y = y + (dense - dense.detach())
        return y

    def _multiply(self, x: Tensor) -> Tensor:
        self.called = True
        with torch.no_grad():
            if x.numel() > self.max_rows * self.in_features and not self.passes_gradient:
                return self.dense(x)
            rows = x.reshape(-1, self.in_features)  # [m, in]
            if self.inverse_scales is not None:
                rows = rows * self.inverse_scales  # [m, in]
            y = self.packed.linear(rows.to(self.packed.activation_dtype)).to(result_dtype(x))  # [m, out]
            if self.bias is not None:
                y += self.bias  # in place, so the sum keeps y's dtype
            return y.reshape(*x.shape[:-1], self.out_features)  # [..., out]

    @property
    def bias(self) -> Tensor | None:
        """[out]"""
        if self.has_adapter or self.merged_bias is not None:
            return self.merged_bias
        bias: Tensor | None = self.dense.bias
        return bias


class JoinedWeight(NamedTuple):
    """A weight joined from the weights of several projections of one input."""

    packed: PackedWeight
    bias: Tensor | None  # [out of all]
    parts: int


def project(x: Tensor, *layers: Any) -> list[Tensor]:
    """Returns the outputs of `layers` for x [..., in]: by one product if they have joined quantized weights, no hooks
    and no gradients."""
    joined = _joined_weight(layers)
    if joined is None or x.numel() > joined.packed.max_rows * x.shape[-1]:
        return [layer(x) for layer in layers]
    with torch.no_grad():
        rows = x.reshape(-1, x.shape[-1]).to(joined.packed.activation_dtype)  # [m, in]
        y = joined.packed.linear(rows).to(result_dtype(x))  # [m, out of all]
        if joined.bias is not None:
            y += joined.bias
        sizes: list[Any] = [layer.out_features for layer in layers]
        for layer in layers:
            layer.called = True
        return [part.view(*x.shape[:-1], part.shape[1]) for part in y.split(sizes, dim=1)]  # [..., out] each


def join(*layers: QuantizedLinear) -> None:
    """Makes the weights of the siblings `layers` (`LayerSpec.siblings`) slices of one weight if their kernel can. They
    must be refreshed afterwards."""
    biases = [bias.detach() for layer in layers if (bias := under_adapters(layer.dense).bias) is not None]
    packed = join_rows([layer.packed for layer in layers])
    if packed is None:
        return
    joined = JoinedWeight(packed, torch.cat(biases) if biases else None, len(layers))
    for place, layer in enumerate(layers):
        layer.joined, layer.place = joined, place
    if joined.bias is not None:
        for layer, bias in zip(layers, joined.bias.split([len(bias) for bias in biases]), strict=True):
            layer.merged_bias = bias  # the next refresh writes it


def _joined_weight(layers: Sequence[Any]) -> JoinedWeight | None:
    for place, layer in enumerate(layers):
        if type(layer) is not QuantizedLinear or layer.joined is not layers[0].joined or layer.place != place:
            return None
        if layer.passes_gradient or not is_unwatched(layer):
            return None
    joined: JoinedWeight | None = layers[0].joined
    return joined if joined is not None and joined.parts == len(layers) else None


def is_unwatched(module: nn.Module) -> bool:
    """Whether a call of `module` runs only its class's forward: no hooks, no other forward."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a dense layer's result for `x`, also of K/V caches."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
