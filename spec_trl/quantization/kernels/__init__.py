"""Multiplies with packed weights, and chooses among the kernels."""

from dataclasses import replace

import torch

from ...native.cpu_products import DTYPES
from .base import LayerSpec, PackedWeight, QuantizedRows
from .bitsandbytes_nf4 import BitsAndBytesNF4Cpu, BitsAndBytesNF4Cuda
from .kernel_times import announce, choose_measured, default_kernel, known_table
from .marlin_humming import HummingInt4, MarlinInt4
from .native import Native, NativeInt4, NativeInt8
from .onnxruntime_int4 import OnnxRuntimeInt4, is_fastest
from .reference import ReferenceInt4, ReferenceInt8, ReferenceNF4
from .torch_core import TorchInt4Cpu, TorchInt4Cuda, TorchInt8Cpu
from .triton_int4 import TritonInt4


# On a CPU a rule decides, on a GPU measured times.
FAST_KERNELS: tuple[type[PackedWeight], ...] = (
    TorchInt4Cpu, OnnxRuntimeInt4, NativeInt4, TorchInt4Cuda, TritonInt4, HummingInt4, MarlinInt4, TorchInt8Cpu,
    NativeInt8, BitsAndBytesNF4Cpu, BitsAndBytesNF4Cuda,
)  # fmt: skip
KERNELS: tuple[type[PackedWeight], ...] = (*FAST_KERNELS, ReferenceInt4, ReferenceInt8, ReferenceNF4)
KERNEL_NAMES = ("auto", *dict.fromkeys(kernel.name for kernel in KERNELS))

__all__ = [
    "FAST_KERNELS",
    "KERNELS",
    "KERNEL_NAMES",
    "LayerSpec",
    "PackedWeight",
    "QuantizedRows",
    "announce",
    "find_kernel",
    "fitting_kernels",
    "make_packed",
]


def fitting_kernels(name: str, layer: LayerSpec) -> list[type[PackedWeight]] | str:
    """Returns the kernels called `name` that can hold `layer`, under "auto" all fast ones; or why there is none."""
    named = FAST_KERNELS if name == "auto" else [kernel for kernel in KERNELS if kernel.name == name]
    codes = layer.bits, layer.normal_float
    kernels = [k for k in named if (k.bits, k.normal_float) == codes and k.device_type in (None, layer.device.type)]
    reasons = {kernel: kernel.unsupported(layer) for kernel in kernels}
    fitting = [kernel for kernel, reason in reasons.items() if reason is None]
    why = "; ".join(f"{kernel.name}: {reason}" for kernel, reason in reasons.items())
    kind = "NF4" if layer.normal_float else f"{layer.bits}-bit"
    return fitting or why or f"kernel {name!r} has nothing for {kind} weights on {layer.device.type}"


def find_kernel(name: str, layer: LayerSpec, measures: bool = True) -> type[PackedWeight] | str:
    """Returns the kernel for `layer`, or the reason why there is none.

    "auto" takes the fastest kernel that can hold the layer, on a CPU by a rule, on a GPU by measured times; none if
    the dense layer is faster, and never "reference". Siblings get the kernel that is fastest for all, if one can hold
    all.

    Args:
        name: "auto" or a kernel's name.
        measures: whether to measure unknown times; else `default_kernel` is taken.
    """
    choice = _choose(name, layer, measures)
    return choice if isinstance(choice, str) else choice[0]


def make_packed(name: str, layer: LayerSpec, measures: bool = True) -> PackedWeight | str:
    """An empty packed weight of the kernel of `find_kernel`, or the reason why there is none. Under "auto" on a GPU
    its `max_rows` is the measured one."""
    choice = _choose(name, layer, measures)
    if isinstance(choice, str):
        return choice
    kernel, max_rows, is_final = choice
    packed = kernel(layer)
    packed.max_rows = packed.max_rows if max_rows is None else max_rows
    packed.is_final = is_final
    return packed


def _choose(name: str, layer: LayerSpec, measures: bool) -> tuple[type[PackedWeight], int | None, bool] | str:
    """Returns the kernel, its max_rows if times decide, and whether the choice is final."""
    fitting = fitting_kernels(name, layer)
    if isinstance(fitting, str):
        return fitting
    if name != "auto" or layer.device.type != "cuda":
        native = [kernel for kernel in fitting if issubclass(kernel, Native)]
        if name == "auto" and native and layer.policy_dtype in DTYPES and not torch.is_autocast_enabled("cpu"):
            return native[0], None, True
        preferred = name == "auto" and OnnxRuntimeInt4 in fitting and is_fastest(layer)
        return OnnxRuntimeInt4 if preferred else fitting[0], None, True
    shared = [kernel for kernel in fitting if all(kernel.unsupported(part) is None for part in layer.parts)]
    asked = (layer, shared) if shared else (replace(layer, siblings=()), fitting)
    is_final = measures or known_table(*asked) is not None
    choice = choose_measured(*asked) if is_final else default_kernel(asked[1])
    if choice is None:
        return "no kernel was measured to be faster than the dense layer"
    return next(kernel for kernel in fitting if kernel.name == choice.kernel), choice.max_rows, is_final
