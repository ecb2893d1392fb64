"""The module that takes the place of a mixture's stacked experts in the drafter. The router stays dense."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .kernels import PackedWeight
from .linear import result_dtype
from .rtn import RoundToNearest
from .source_weight import FLOAT_DTYPES, SourceSpec, is_adapter, merge_copy, under_adapters


@dataclass(frozen=True)
class ExpertStack:
    """How many experts there are, and what one matrix of one of them is like."""

    experts: int
    matrix: SourceSpec


def is_experts(module: nn.Module) -> bool:
    """Whether `module` holds stacked experts behind transformers' experts interface, adapters included."""
    experts = under_adapters(module)
    return "is_transposed" in vars(experts) and "down_proj" in experts._parameters


def holds_stacked_weights(module: nn.Module) -> bool:
    """Whether `module` itself holds 3-D weights that are no convolution's."""
    parameters = under_adapters(module)._parameters.values()
    return not isinstance(module, _ConvNd) and any(p is not None and p.dim() == 3 for p in parameters)


def matrix_names(module: nn.Module) -> tuple[str, str]:
    """The names of the first and the second stacked Parameter."""
    return ("gate_up_proj" if under_adapters(module).has_gate else "up_proj"), "down_proj"


def inspect_experts(module: nn.Module, name: str) -> ExpertStack | str:
    """Count, shape, dtype and device of the experts' matrices called `name`, or why they cannot be packed."""
    experts = under_adapters(module)
    stacked = experts._parameters[name]
    if stacked.device.type != "cpu":
        return "packed experts run one by one, which is slower than the dense ones on a GPU"
    if vars(experts).get("has_post_expert_norm"):
        return "its experts end in a norm of their own"
    if type(stacked.data) is not Tensor or stacked.dtype not in FLOAT_DTYPES:
        return f"its weights are a {type(stacked.data).__name__} of {stacked.dtype}, not plain numbers"
    matrices = matrices_of(experts, name)
    out_features, in_features = matrices[0].shape
    return ExpertStack(len(matrices), SourceSpec(out_features, in_features, stacked.dtype, stacked.device))


def matrices_of(experts: Any, name: str) -> list[Tensor]:
    """Views of the experts' matrices, [out, in] each."""
    stacked = experts._parameters[name].detach()  # [experts, out, in], or [experts, in, out]
    return list(stacked.transpose(1, 2) if experts.is_transposed else stacked)


class QuantizedExperts(nn.Module):
    """Runs each expert that some token chose with its own packed weights; the replaced module where rows are many.

    Attributes: `dense`, `called` and `passes_gradient` as of QuantizedLinear, but that no gradient passes: it goes by
        experts along the residual stream.
        first: packed gate_up_proj (or up_proj) of each expert.
        second: packed down_proj of each expert.
    """

    def __init__(self, dense: nn.Module, first: list[PackedWeight], second: list[PackedWeight]) -> None:
        super().__init__()
        self._dense = (dense, under_adapters(dense))  # a tuple, so that nn.Module does not register them
        self.first, self.second = first, second
        self.packed = nn.ModuleList((*first, *second))  # registers their buffers
        self.passes_gradient = False
        self.called = False

    @property
    def dense(self) -> Any:
        """The replaced module."""
        return self._dense[0]

    @property
    def weight_count(self) -> int:
        """How many weights are packed."""
        return sum(p.layer.in_features * p.layer.out_features for p in (*self.first, *self.second))

    @property
    def max_rows(self) -> int:
        """Rows of one expert up to which its packed weights are used."""
        return self.first[0].max_rows

    @property
    def packed_bytes(self) -> int:
        """Bytes the packed weights occupy."""
        return sum(packed.nbytes for packed in (*self.first, *self.second))

    def refresh(self, quantizer: RoundToNearest) -> None:
        """Quantize the present weights into the same buffers."""
        source = merge_copy(self.dense) if is_adapter(self.dense) else self.dense
        for name, packed_matrices in zip(matrix_names(source), (self.first, self.second), strict=True):
            for weight, packed in zip(matrices_of(source, name), packed_matrices, strict=True):
                quantizer.quantize_(weight, packed)
        self.called = False

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [tokens, hidden], chosen and shares [tokens, top_k] → [tokens, hidden]. Without gradient."""
        self.called = True
        experts, dtype = self._dense[1], result_dtype(x)
        first_name, second_name = matrix_names(experts)
        with torch.no_grad():
            is_many = chosen.numel() > self.max_rows * len(self.first)  # of rows of an average expert
            if is_many and not self.passes_gradient:
                return self.dense(x, chosen, shares)
            y = torch.zeros_like(x)  # [tokens, hidden]
            for expert in chosen.unique().tolist():
                token, slot = torch.where(chosen == expert)  # [m], [m]
                h = self._multiply(self.first[expert], first_name, expert, x[token], dtype)  # [m, 2 * inner]
                h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)  # [m, inner]
                h = self._multiply(self.second[expert], second_name, expert, h, dtype)  # [m, hidden]
                y.index_add_(0, token, (h * shares[token, slot, None]).to(y.dtype))
            return y

    def _multiply(self, packed: PackedWeight, name: str, expert: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [m, in] through one packed matrix and its live bias → [m, out]."""
        y = packed.linear(x.to(packed.activation_dtype)).to(dtype)  # [m, out]
        if self._dense[1].has_bias:
            y += self._dense[1]._parameters[f"{name}_bias"][expert]  # [out]
        return y
