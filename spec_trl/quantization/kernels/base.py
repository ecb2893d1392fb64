"""Defines the interface between the quantizer, which makes codes, and kernels, which store them."""

import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


NORMAL_FLOATS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4's values by code: quantiles of a normal distribution over the largest, with an exact zero (QLoRA, Dettmers et
al. 2023, §3 and App. E)."""


@dataclass(frozen=True)
class LayerSpec:
    """Spec of a weight matrix [out_features, in_features], for the choice of a kernel.

    Attributes:
        bits: 4 (asymmetric, integer zero points; or NF4) or 8 (symmetric).
        group: number of weights of a row that share a scale; divides in_features.
        policy_dtype: dtype of the policy's products with this weight.
        activation_dtype: wanted dtype of activations and scales; None = the kernel's choice.
        normal_float: whether 4 bits are NF4.
        siblings: output features of all projections of the same input, this one included, if one product may serve
            them; else empty. Siblings get one kernel.
    """

    out_features: int
    in_features: int
    bits: int
    group: int
    policy_dtype: torch.dtype
    activation_dtype: torch.dtype | None
    device: torch.device
    normal_float: bool = False
    siblings: tuple[int, ...] = ()

    @property
    def parts(self) -> list["LayerSpec"]:
        """The siblings, or the layer alone."""
        return [replace(self, out_features=rows, siblings=()) for rows in self.siblings or (self.out_features,)]

    @property
    def shape(self) -> str:
        """Text such as "512x256", for siblings "512+128+128x256"."""
        return f"{'+'.join(str(part.out_features) for part in self.parts)}x{self.in_features}"

    @property
    def groups(self) -> int:
        return self.in_features // self.group


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a quantized weight: (codes - zeros) * scales, or for NF4 NORMAL_FLOATS[codes] * scales.

    Attributes:
        codes: int32 [rows, in]; 0..15 for 4 bits, -127..127 for 8. Scratch memory: valid during `pack_` only.
        scales: [rows, groups] in the kernel's activation dtype.
        zeros: [rows, groups], whole numbers 0..15 in a floating dtype; all 0 for 8 bits and NF4.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor


@dataclass(frozen=True)
class Package:
    """A kernel's package: its distribution, its module, and its requirement for `pip install`."""

    name: str
    module: str
    requirement: str


class PackedWeight(nn.Module, ABC):
    """One quantized weight in one kernel's layout. The subclass is the kernel; the instance is a layer's weight.

    Buffers are only written in place, so that captured CUDA graphs survive a refresh. They are non-persistent: a
    checkpoint never holds a copy of the policy.

    Attributes:
        name: the kernel's name; kernels for different devices may share one.
        bits: the width of the codes it stores.
        normal_float: whether the codes are NF4's values.
        device_type: the only kind of device it runs on; None = any.
        package: the package that provides it; None = torch.
        activation_dtypes: dtypes of its products, the best first; empty = any, the policy's first.
        multiples: numbers that must divide out_features and in_features.
        row_block: `pack_` takes blocks that begin at a multiple of this; all but the last have a multiple of rows.
        rows_along: the row dimension of every buffer, if a slice of the buffers is a weight.
        max_rows: above this many rows of x the policy's dense weight is faster.
        is_final: False for a kernel that stands in until times are measured.
        activation_dtype: the dtype of x, y and the scales.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    normal_float: ClassVar[bool] = False
    device_type: ClassVar[str | None] = None
    package: ClassVar[Package | None] = None
    activation_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    multiples: ClassVar[tuple[int, int]] = (1, 1)
    row_block: ClassVar[int] = 1
    rows_along: ClassVar[dict[str, int]] = {}
    max_rows: int = 16
    is_final: bool = True
    activation_dtype: torch.dtype

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        self.layer = layer
        self.activation_dtype = layer.activation_dtype or (*self.activation_dtypes, layer.policy_dtype)[0]

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros for a buffer: assign them to an attribute of this module."""
        return nn.Buffer(torch.zeros(shape, dtype=dtype, device=self.layer.device), persistent=False)

    @classmethod
    def unsupported(cls, layer: LayerSpec) -> str | None:
        """Returns the reason why this kernel cannot hold `layer`, of its codes and kind of device, or None."""
        if cls.activation_dtypes and layer.activation_dtype not in (None, *cls.activation_dtypes):
            known = " or ".join(map(str, cls.activation_dtypes))
            return f"activation_dtype={layer.activation_dtype}, and it computes in {known}"
        sizes = (layer.out_features, layer.in_features)
        for size, multiple, which in zip(sizes, cls.multiples, ("output", "input"), strict=True):
            if size % multiple:
                return f"{size} {which} features are no multiple of {multiple}"
        if cls.package is not None and importlib.util.find_spec(cls.package.module) is None:
            return f'{cls.package.name} is not installed; "pip install {cls.package.requirement}"'
        return None if cls.device_type != "cuda" else gpu_unsupported(layer)

    @abstractmethod
    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        """Stores `rows` in place as rows first_row, first_row + 1, … of the weight."""

    @abstractmethod
    def linear(self, x: Tensor) -> Tensor:
        """x [m, in] @ weightᵀ → [m, out], both in activation_dtype."""

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


def join_rows(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """Makes an empty weight with the rows of `parts`, whose buffers become slices of it: packing a part packs its
    rows. None if parts differ in more than their rows, or the kernel has no slices."""
    first, rows = parts[0], [part.layer.out_features for part in parts]
    if not first.rows_along or any(count % first.row_block for count in rows):
        return None
    for part in parts:
        if type(part) is not type(first) or replace(part.layer, out_features=rows[0]) != first.layer:
            return None
    whole = type(first)(replace(first.layer, out_features=sum(rows)))
    whole.max_rows = min(part.max_rows for part in parts)
    for name, dim in first.rows_along.items():
        sizes = [getattr(part, name).shape[dim] for part in parts]
        for part, rows_of_part in zip(parts, getattr(whole, name).split(sizes, dim), strict=True):
            setattr(part, name, rows_of_part)
    return whole


@functools.lru_cache(maxsize=16)
def normal_floats(dtype: torch.dtype, device: torch.device) -> Tensor:
    """NF4's values, [16]. Cached, since copying them to a GPU synchronizes."""
    with torch.inference_mode(False):
        return torch.tensor(NORMAL_FLOATS, dtype=dtype, device=device)


def join_nibbles(nibbles: Sequence[Tensor]) -> Tensor:
    """Packs nibbles into words: bits 4i … 4i + 3 are nibbles[i], int32 tensors of one shape, 0..15; at most 8."""
    words = nibbles[0].clone()
    for i, nibble in enumerate(nibbles[1:], start=1):
        words |= nibble << (4 * i)
    return words


def pad_rows(rows: QuantizedRows, multiple: int) -> QuantizedRows:
    padding = (0, 0, 0, -len(rows.codes) % multiple)
    if not any(padding):
        return rows
    return QuantizedRows(*(F.pad(part, padding) for part in (rows.codes, rows.scales, rows.zeros)))


def gpu_unsupported(layer: LayerSpec, capability: tuple[int, int] = (8, 0)) -> str | None:
    """Returns the reason why the GPU of `layer` cannot run a kernel for NVIDIA `capability` (default Ampere), or
    None."""
    if torch.version.hip is not None:
        return "the GPU is not NVIDIA's"
    if torch.cuda.get_device_capability(layer.device) < capability:
        return f"the GPU is older than compute capability {capability[0]}.{capability[1]}"
    return None
