"""Replaces a mixture's stacked experts in the drafter. The router stays dense."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .awq import ActivationAware, ChannelStatistics
from .kernels import PackedWeight
from .linear import PackedLayer, result_dtype
from .source_weight import FLOAT_DTYPES, SourceSpec, is_adapter, merge_copy, under_adapters


def is_experts(module: nn.Module) -> bool:
    """Whether `module` holds stacked experts with transformers' experts interface, adapters included."""
    experts = under_adapters(module)
    return "is_transposed" in vars(experts) and isinstance(getattr(experts, "down_proj", None), Tensor)


def holds_stacked_weights(module: nn.Module) -> bool:
    """Whether `module` holds 3-D weights that do not belong to a convolution."""
    parameters = under_adapters(module)._parameters.values()
    return not isinstance(module, _ConvNd) and any(p is not None and p.dim() == 3 for p in parameters)


def matrix_names(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if under_adapters(module).has_gate else "up_proj"), "down_proj"


def inspect_experts(module: nn.Module, name: str) -> SourceSpec | str:
    """Shape, dtype and device of one expert's matrix called `name`, or why the experts cannot be packed."""
    experts = under_adapters(module)
    stacked = getattr(experts, name)  # which a parametrization may compute
    if stacked.device.type != "cpu":
        return "packed experts run one by one, which is slower than the dense ones on a GPU"
    if vars(experts).get("has_post_expert_norm"):
        return "its experts end in a norm"
    if type(stacked.data) is not Tensor or stacked.dtype not in FLOAT_DTYPES:
        return f"its weights are a {type(stacked.data).__name__} of {stacked.dtype}, not plain numbers"
    out_features, in_features = matrices_of(experts, name)[0].shape
    return SourceSpec(out_features, in_features, stacked.dtype, stacked.device)


def matrices_of(module: nn.Module, name: str) -> list[Tensor]:
    """Views of the experts' matrices called `name`, [out, in] each; adapters are not merged in."""
    experts = under_adapters(module)
    stacked = getattr(experts, name).detach()  # [experts, out, in], or [experts, in, out]
    return list(stacked.transpose(1, 2) if experts.is_transposed else stacked)


def run_experts(
    experts: Any,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    multiply: Callable[[int, int, Tensor], Tensor],
) -> Tensor:
    """Runs each expert on the tokens that chose it; a token adds the results in the order of experts. `multiply` gets
    0 for an expert's first matrix or 1 for its second, the expert, and its tokens."""
    y = torch.zeros_like(x)  # [tokens, hidden]
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)  # [m], [m]
        h = multiply(0, expert, x[token])  # [m, 2 * inner]
        h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)  # [m, inner]
        h = multiply(1, expert, h)  # [m, hidden]
        y.index_add_(0, token, (h * shares[token, slot, None]).to(y.dtype))
    return y


class QuantizedExperts(PackedLayer):
    """Runs the chosen experts with packed weights, `first` of gate_up_proj (or up_proj) and `second` of down_proj, and
    the replaced module for many rows. No gradient passes."""

    def __init__(self, dense: nn.Module, first: list[PackedWeight], second: list[PackedWeight]) -> None:
        super().__init__(dense)
        self.first, self.second = first, second
        self._merged_biases: dict[str, Tensor] = {}  # [experts, out] each; of adapted experts, copied by a refresh
        self.packed = nn.ModuleList(self.packed_weights)  # registers their buffers

    @property
    def packed_weights(self) -> list[PackedWeight]:
        return [*self.first, *self.second]

    def refresh(self, quantizer: ActivationAware, activations: ChannelStatistics | None = None) -> None:
        """Quantizes the present weights into the same buffers, rounded to nearest: inputs of experts are not
        observed."""
        source = merge_copy(self.dense) if is_adapter(self.dense) else self.dense
        for name, packed_matrices in zip(matrix_names(source), (self.first, self.second), strict=True):
            if source.has_bias and source is not self.dense:
                self._merged_biases[name] = getattr(source, f"{name}_bias").detach()
            for weight, packed in zip(matrices_of(source, name), packed_matrices, strict=True):
                quantizer.quantize_(weight, packed)
        self.called = False

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [tokens, hidden], chosen and shares [tokens, top_k] → [tokens, hidden]. Without gradient."""
        self.called = True
        experts, dtype = under_adapters(self.dense), result_dtype(x)
        names = matrix_names(experts)

        def multiply(place: int, expert: int, x: Tensor) -> Tensor:
            packed = (self.first, self.second)[place][expert]
            y = packed.linear(x.to(packed.activation_dtype)).to(dtype)  # [m, out]
            if experts.has_bias:
                biases = self._merged_biases.get(names[place])
                y += (getattr(experts, f"{names[place]}_bias") if biases is None else biases)[expert]  # [out]
            return y

        with torch.no_grad():
            is_many = chosen.numel() > self.max_rows * len(self.first)  # more than max_rows per expert on average
            if is_many and not self.passes_gradient:
                return self.dense(x, chosen, shares)
            return run_experts(experts, x, chosen, shares, multiply)
