"""Every 4-bit kernel over the dense layer, for the projections of one decoder layer and the head, by rows of x; and
the dense product whose rows do not depend on each other ("exact"), also for a prompt.

Weights lie in rotating copies that no cache holds, and calls are replayed from a CUDA graph. Each result is compared
with the reference kernel's codes multiplied in float32 before anything is timed.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from spec_trl.quantization.kernels import KERNELS, LayerSpec, PackedWeight, make_packed
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.rtn import RoundToNearest
from spec_trl.quantization.scheme import find_scheme

from .attention import dtype_on
from .part import Part
from .shapes import config_of
from .timing import compare, copies_for, copy_bandwidth, relative_error


ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 1024
SCHEME = "rtn-w4-g128"
TOLERANCE = 0.02
"""Relative error from which on a kernel's numbers are called wrong: bfloat16 rounding gives a few thousandths."""


def layer_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the distinct matrices, by the names of the layers that have them."""
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    query, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layers = {  # where most of the bytes are comes first: time may run out
        "gate_proj, up_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
        "q_proj": (query, config.hidden_size),
        "o_proj": (config.hidden_size, query),
        "lm_head": (config.vocab_size, config.hidden_size),
        "k_proj, v_proj": (kv, config.hidden_size),
    }
    shapes: dict[tuple[int, int], list[str]] = {}
    for name, shape in layers.items():
        shapes.setdefault(shape, []).append(name)
    return {", ".join(names): shape for shape, names in shapes.items()}


def four_bit_kernels(device: torch.device) -> list[type[PackedWeight]]:
    """All that can run on `device` for codes of equal steps, but the reference, which is not meant to be fast."""
    return [
        kernel
        for kernel in KERNELS
        if (kernel.bits, kernel.normal_float) == (4, False)
        and kernel.device_type in (None, device.type)
        and kernel is not ReferenceInt4
    ]


class Matrix:
    """One weight of a shape, in bfloat16 and as the reference kernel holds it."""

    def __init__(self, name: str, shape: tuple[int, int], device: torch.device, seed: int) -> None:
        self.name, self.device = name, device
        generator = torch.Generator(device).manual_seed(seed)
        self.weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        group = find_scheme(SCHEME).group_for(shape[1])
        if group is None:
            raise ValueError(f"{shape[1]} inputs of {name} fit no group")
        self.layer = LayerSpec(shape[0], shape[1], 4, group, torch.bfloat16, torch.bfloat16, device)
        self.quantizer = RoundToNearest()
        reference = ReferenceInt4(self.layer)
        self.quantizer.quantize_(self.weight, reference)
        wide = ReferenceInt4(replace(self.layer, activation_dtype=torch.float32))  # not rounded again
        for target, source in zip(wide.buffers(), reference.buffers(), strict=True):
            target.copy_(source)
        self._reference = wide
        self.shape = shape
        random = partial(torch.randn, device=device, generator=generator)
        self.inputs = {m: random(m, shape[1]).bfloat16() for m in (*ROWS, PROMPT)}

    def expected(self, rows: int) -> Tensor:
        """[m, out] float32."""
        return F.linear(self.inputs[rows].float(), self._reference.dequantize())


def time_rows(
    part: Part, matrix: Matrix, packed: Sequence[PackedWeight], dense: Sequence[Tensor], m: int
) -> dict[str, Any]:
    """Seconds and error with `m` rows, next to the dense layer's in the same turns."""
    x = matrix.inputs[m]  # [m, in]
    error = relative_error(packed[0].linear(x), matrix.expected(m))
    if not error < TOLERANCE:
        return {"relative_error": error, "wrong": True}
    works = {
        "packed": [partial(weight.linear, x) for weight in packed],
        "dense": [partial(F.linear, x, weight) for weight in dense],
    }
    timings = compare(works, part.device)
    seconds = {name: timing.seconds for name, timing in timings.items()}
    activations = 2 * m * sum(matrix.shape)  # bytes
    return {
        "relative_error": error,
        "packed": asdict(timings["packed"]),
        "dense": asdict(timings["dense"]),
        "speedup": seconds["dense"] / seconds["packed"],
        "packed_bytes_per_second": (packed[0].nbytes + activations) / seconds["packed"],
        "dense_bytes_per_second": (dense[0].nbytes + activations) / seconds["dense"],
    }


def time_kernel(part: Part, matrix: Matrix, kernel: type[PackedWeight], dense: Sequence[Tensor]) -> dict[str, Any]:
    """All numbers of rows."""
    reason = kernel.unsupported(matrix.layer)
    if reason is not None:
        return {"unsupported": reason}
    first = kernel(matrix.layer)
    matrix.quantizer.quantize_(matrix.weight, first)
    packed = [first, *(copy.deepcopy(first) for _ in range(1, copies_for(first.nbytes, part.device)))]
    by_rows: dict[int, Any] = {}
    for m in ROWS:
        key = f"{matrix.name} | {kernel.name} | {m} rows"
        by_rows[m] = part.attempt(key, partial(time_rows, part, matrix, packed, dense, m))
    return {"packed_bytes": packed[0].nbytes, "max_rows": packed[0].max_rows, "by_rows": by_rows}


def time_exact(part: Part, matrix: Matrix, dense: Sequence[Tensor]) -> dict[int, Any]:
    """The exact product over torch's, by rows; a row's bits must be those that it has alone."""
    from spec_trl.generation.engine.kernels.dense_product import dense_product

    by_rows: dict[int, Any] = {}
    dtype = dtype_on(part.device)
    dense = [weight.to(dtype) for weight in dense]
    for m in (1, 4) if part.is_smoke else (1, 4, 16, 64, PROMPT):
        x = matrix.inputs[m].to(dtype)  # [m, in]
        found = dense_product(x, dense[0])  # [m, out]
        error = relative_error(found, F.linear(x.float(), dense[0].float()))
        if not error < TOLERANCE or not torch.equal(found[-1:], dense_product(x[-1:], dense[0])):
            by_rows[m] = {"relative_error": error, "wrong": True}
            continue
        products = {"exact": dense_product, "dense": F.linear}
        works = {name: [partial(product, x, weight) for weight in dense] for name, product in products.items()}
        timings = compare(works, part.device)
        seconds = {name: timing.seconds for name, timing in timings.items()}
        by_rows[m] = {"relative_error": error, "exact over dense": seconds["exact"] / seconds["dense"], **seconds}
    return by_rows


def choice(matrix: Matrix) -> dict[str, Any]:
    """What "auto" takes for the matrix, and how long choosing took; measured before, it is read from the cache."""
    started = time.perf_counter()
    packed = make_packed("auto", matrix.layer)
    seconds = time.perf_counter() - started
    if isinstance(packed, str):
        return {"none": packed, "seconds": seconds}
    return {"kernel": packed.name, "max_rows": packed.max_rows, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("kernels", __doc__, arguments)
    shapes = layer_shapes(config_of(part.shape))
    part.state(dtype="bfloat16", scheme=SCHEME, rows=list(ROWS), shapes={n: list(s) for n, s in shapes.items()})
    part.measure("copy_bandwidth", partial(copy_bandwidth, part.device))
    for number, (name, shape) in enumerate(shapes.items()):
        matrix = part.attempt(name, partial(Matrix, name, shape, part.device, part.seed + number))
        if matrix is None:
            continue
        count = copies_for(matrix.weight.nbytes, part.device)
        dense = [matrix.weight, *(matrix.weight.clone() for _ in range(1, count))]
        part.measure(f"{name} | auto", partial(choice, matrix))
        if part.triton_absent is None:
            part.measure(f"{name} | exact", partial(time_exact, part, matrix, dense))
        for kernel in four_bit_kernels(part.device):
            key = f"{name} | {kernel.name}"
            part.measure(key, partial(time_kernel, part, matrix, kernel, dense))
        del matrix, dense
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
