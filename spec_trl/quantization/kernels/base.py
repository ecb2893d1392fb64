"""The interface between the quantizer, which makes codes, and the kernels, which each store them their own way."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerSpec:
    """One weight matrix, as a kernel must know it before it stores it.

    Attributes:
        out_features, in_features: shape of the weight, [out, in].
        bits: 4 (asymmetric, integer zero points) or 8 (symmetric).
        group: weights of a row that share a scale; divides in_features.
        policy_dtype: dtype in which the policy computes with this weight.
        activation_dtype: dtype the caller wants activations and scales in; None = the kernel's choice.
        device: where the weight lives.
    """

    out_features: int
    in_features: int
    bits: int
    group: int
    policy_dtype: torch.dtype
    activation_dtype: torch.dtype | None
    device: torch.device

    @property
    def groups(self) -> int:
        """Scales per row."""
        return self.in_features // self.group


@dataclass(frozen=True)
class QuantizedRows:
    """Some rows of a quantized weight: weight = (codes - zeros) * scales, group by group.

    Attributes:
        codes: int32 [rows, in]; 0..15 for 4 bits, -127..127 for 8. Scratch memory: valid during `pack_` only.
        scales: [rows, groups] in the kernel's activation dtype.
        zeros: [rows, groups], whole numbers 0..15 in a floating dtype; None for 8 bits.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


class PackedWeight(nn.Module, ABC):
    """One quantized weight in one kernel's layout. The subclass is the kernel; the instance is a layer's weight.

    The buffers are allocated once and only ever written in place, so a captured CUDA graph that reads them survives
    a refresh. They are non-persistent: a checkpoint never holds a copy of the policy.

    Attributes:
        name: the kernel's name; kernels for different devices may share one.
        bits: the width of the codes it stores.
        device_type: the only kind of device it runs on; None = any.
        package: the package, torch aside, that its speed comes from; None = there is none.
        row_block: `pack_` takes rows from a multiple of this on, and (but for the last rows) a multiple of them.
        max_rows: above this many rows of x the policy's dense weight is faster.
        activation_dtype: the dtype of x, y and the scales.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    device_type: ClassVar[str | None]
    package: ClassVar[str | None] = None
    row_block: ClassVar[int]
    max_rows: int
    activation_dtype: torch.dtype

    def __init__(self, layer: LayerSpec) -> None:
        """Allocate the buffers for `layer`, which `unsupported` has let pass; their contents are undefined."""
        super().__init__()
        self.layer = layer

    @classmethod
    @abstractmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        """Why this kernel cannot hold `layer`, of its bits and on its device; None when it can."""

    @abstractmethod
    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        """Store `rows` in place as rows first_row, first_row + 1, … of the weight."""

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:
        """x [m, in] @ weightᵀ → [m, out], both in activation_dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weight occupies."""
        return sum(buffer.nbytes for buffer in self.buffers())


def join_nibbles(nibbles: Sequence[Tensor]) -> Tensor:
    """Words of which bits 4i … 4i + 3 are nibbles[i]: int32 tensors of one shape with values 0..15; 8 at most."""
    words = nibbles[0].clone()
    for i, nibble in enumerate(nibbles[1:], start=1):
        words |= nibble << (4 * i)
    return words


def permute_scales(values: Tensor) -> Tensor:
    """[rows, groups] → [groups, rows], of each 64 rows those with the same row % 8 together.

    The lanes of a tensor-core fragment want it so: Marlin and Humming store scales and zero points in this order.
    """
    rows, groups = values.shape
    return values.view(rows // 64, 8, 8, groups).permute(3, 0, 2, 1).reshape(groups, rows)  # [groups, rows]


def gpu_unsupported(layer: LayerSpec, capability: tuple[int, int]) -> str | None:
    """Why the GPU that holds `layer` cannot run a kernel for NVIDIA GPUs from `capability` on; None when it can."""
    if torch.version.hip is not None:
        return "the GPU is not NVIDIA's"
    if torch.cuda.get_device_capability(layer.device) < capability:
        return f"the GPU is older than compute capability {capability[0]}.{capability[1]}"
    return None
