"""Reads the weight that a projection multiplies with now, without changing the layer.

Known kinds: `nn.Linear`, transformers' `Conv1D`, bitsandbytes' `Linear4bit` and `Linear8bitLt`, each also under peft
adapters, and the stacked experts of transformers (`gate_up_proj`, `down_proj` as [experts, ...] parameters).
"""

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BNB_WEIGHTS = ("Params4bit", "Int8Params")  # by name: importing bitsandbytes takes seconds and a GPU build

# Names that torch.compile and FSDP's activation checkpointing give to the wrapped module.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class SourceSpec:
    """Shape [out, in], dtype of computation and device of a projection's weight."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    device: torch.device


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of `model` by their names without wrappers; a wrapped module replaces its wrapper."""
    modules = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        for wrapper in WRAPPED:
            while wrapper in parts:
                parts.remove(wrapper)
        modules[".".join(parts)] = module
    return modules


def is_adapter(module: nn.Module) -> bool:
    """Whether `module` is a layer that peft wraps around another layer (LoRA, DoRA, …)."""
    peft = sys.modules.get("peft.tuners.tuners_utils")  # if it was never imported, no such layer exists
    return peft is not None and isinstance(module, peft.BaseTunerLayer)


def is_trained_copy(module: nn.Module) -> bool:
    """Whether `module` is peft's wrapper around a second copy of a layer (modules_to_save, trainable tokens)."""
    peft = sys.modules.get("peft.utils.other")  # as above
    return peft is not None and isinstance(module, peft.AuxiliaryTrainingWrapper)


def under_adapters(module: Any) -> Any:
    """The layer below all peft adapters; `module` itself where there are none."""
    return module.get_base_layer() if is_adapter(module) else module


def is_projection(module: nn.Module) -> bool:
    """Whether `module` is a linear layer, adapters included."""
    return isinstance(under_adapters(module), (nn.Linear, Conv1D))


def inspect_projection(module: Any) -> SourceSpec | str:
    """Shape, dtype and device of the weight of a linear layer, or the reason why it cannot be read."""
    base = under_adapters(module)
    weight = base.weight
    kind = type(weight).__name__
    if kind in BNB_WEIGHTS:
        if is_adapter(module) and type(module).__name__ not in ("Linear4bit", "Linear8bitLt"):
            return f"{type(module).__name__} adapters on {kind} weights cannot be merged without rounding"
        if is_adapter(module) and any(module.use_dora.get(name) for name in module.active_adapters):
            return f"DoRA on {kind} weights cannot be merged without rounding"
        dtype = weight.quant_state.dtype if kind == "Params4bit" else torch.float16
        return SourceSpec(base.out_features, base.in_features, dtype, weight.device)
    if weight.device.type == "meta":
        return "its weight is offloaded"
    if "weight" in vars(base):
        return "hooks compute its weight in every forward (pruning, torch.nn.utils.weight_norm)"
    if type(weight.data) is not Tensor or weight.dim() != 2:
        return f"its weight is a {type(weight.data).__name__} of shape {tuple(weight.shape)}, not a plain matrix"
    if weight.dtype not in FLOAT_DTYPES:
        return f"its weight is already quantized ({weight.dtype})"
    out_features, in_features = weight.T.shape if isinstance(base, Conv1D) else weight.shape
    return SourceSpec(out_features, in_features, weight.dtype, weight.device)


def read_projection(module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out] that `module`, a linear layer, applies now, adapters merged in.

    Without adapters the weight is a view of the live Parameter and the bias is the live Parameter.
    """
    base = under_adapters(module)
    if type(base.weight).__name__ in BNB_WEIGHTS:
        return _read_bitsandbytes(module, base), base.bias
    merged = merge_copy(module) if is_adapter(module) else module
    weight = merged.weight.detach()
    return (weight.T if isinstance(merged, Conv1D) else weight), merged.bias


def merge_copy(adapter: nn.Module) -> Any:
    """A copy of the layer below peft's `adapter`, with the active adapters merged by peft itself."""
    layer: Any = copy.deepcopy(adapter)  # one layer: the policy is never touched
    with torch.autocast(next(layer.parameters()).device.type, enabled=False):  # merge in the weight's precision
        while is_adapter(layer):
            if not layer.disable_adapters:
                layer.merge()
            layer = layer.base_layer
    return layer


def _read_bitsandbytes(module: Any, base: Any) -> Tensor:
    """Dequantized weight [out, in] plus the active adapters' deltas; peft's own merge would round to bnb's grid."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    if type(base.weight).__name__ == "Int8Params":
        weight = dequantize_bnb_weight(base.weight, base.state).to(torch.float32)  # [out, in]
    elif "packing_format_for_cpu" in vars(base.weight.quant_state) and base.weight.quant_state.packing_format_for_cpu:
        weight = _unpack_four_bits_for_cpu(base.weight)  # [out, in]
    else:
        weight = dequantize_bnb_weight(base.weight).to(torch.float32)  # [out, in]
    if is_adapter(module) and not module.disable_adapters:
        for name in module.active_adapters:
            if name in module.lora_A and name not in module.merged_adapters:
                weight += module.get_delta_weight(name)  # [out, in]
    return weight


def _unpack_four_bits_for_cpu(weight: Any) -> Tensor:
    """Dequantized weight [out, in], float32, of a Linear4bit whose first forward in eval mode on a CPU has permuted
    the codes in place, in blocks of 32 rows: bitsandbytes' own dequantization of the result is wrong (0.50)."""
    state = weight.quant_state
    out_features, in_features = state.shape
    packed = weight.data.view(torch.uint8).reshape(-1, 32)  # [out * in / 64, 32]
    codes = torch.cat((packed & 15, packed >> 4), dim=-1)  # [out * in / 64, 64]
    codes = codes.view(out_features // 32, in_features // 2, 32, 2).transpose(1, 2)  # [out / 32, 32, in / 2, 2]
    values = state.code[codes.reshape(out_features, in_features).long()]  # [out, in]
    blocks = values.view(out_features, -1, state.blocksize) * state.absmax.T[..., None]  # [out, blocks, blocksize]
    return blocks.view(out_features, in_features).to(torch.float32)  # [out, in]
