"""Kernels that multiply with packed weights, and the choice among them."""

from .base import LayerSpec, PackedWeight, QuantizedRows
from .reference import ReferenceInt4, ReferenceInt8
from .torch_int4 import TorchInt4Cpu, TorchInt4Cuda
from .torch_int8 import TorchInt8Cpu


FAST_KERNELS: tuple[type[PackedWeight], ...] = (TorchInt4Cpu, TorchInt4Cuda, TorchInt8Cpu)  # best first
KERNELS: tuple[type[PackedWeight], ...] = (*FAST_KERNELS, ReferenceInt4, ReferenceInt8)

__all__ = ["KERNELS", "LayerSpec", "PackedWeight", "QuantizedRows", "check_kernel_name", "find_kernel"]


def check_kernel_name(name: str) -> None:
    """Refuse a kernel name that nothing answers to.

    Raises:
        ValueError: `name` is neither "auto" nor a kernel's name.
    """
    names = ["auto", *dict.fromkeys(kernel.name for kernel in KERNELS)]
    if name not in names:
        raise ValueError(f"kernel={name!r} is not a kernel; use one of {names}")


def find_kernel(name: str, layer: LayerSpec) -> type[PackedWeight] | str:
    """The kernel for `layer`, or, where there is none, the reason.

    "auto" takes the fastest one that can hold the layer. It never falls back to "reference", which is slower than the
    policy's own dense layer.
    """
    kernels = FAST_KERNELS if name == "auto" else tuple(kernel for kernel in KERNELS if kernel.name == name)
    reasons = []
    for kernel in kernels:
        if kernel.bits == layer.bits and kernel.device_type in (None, layer.device.type):
            reason = kernel.unsupported(layer)
            if reason is None:
                return kernel
            reasons.append(f"{kernel.name}: {reason}")
    return "; ".join(reasons) or f"kernel {name!r} has nothing for {layer.bits}-bit weights on {layer.device.type}"
