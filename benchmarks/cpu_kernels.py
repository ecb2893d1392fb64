"""4-bit kernels on a CPU: all projections and the head of a model's shape, against the policy's dense layers.

Where bitsandbytes is installed its NF4 is one of them.
Weights are random. Dense and kernels run in turns, each over all layers as a draft step does; medians of the turns.
"""

import importlib.util
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from spec_trl.dense_linear import dense_class
from spec_trl.quantization.kernels import KERNELS, LayerSpec, fitting_kernels
from spec_trl.quantization.kernels.kernel_times import random_rows

from .measure import Finding, Options, begin, shown, spread, write_result
from .models import DTYPES


SHAPES = {  # layers; (out, in) of a layer's projections; of the head
    "qwen2.5-0.5b": (
        24, ((896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)), (151936, 896),
    ),
    "tiny": (1, ((128, 128),), (512, 128)),
}  # fmt: skip


def dense_layer(shape: tuple[int, int], dtype: torch.dtype) -> nn.Module:
    """What a shadow runs."""
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    layer.__class__ = dense_class(nn.Linear, layer)
    return layer


def make_kernels(shapes: list[tuple[int, int]], dtype: torch.dtype) -> dict[str, list[Any]]:
    """Packed layers by the name of their kernel."""
    made: dict[str, list[Any]] = {}
    kinds = [(128, False)] if importlib.util.find_spec("bitsandbytes") is None else [(128, False), (64, True)]
    for shape, (group, normal_float) in itertools.product(shapes, kinds):
        layer = LayerSpec(*shape, 4, group, dtype, None, torch.device("cpu"), normal_float)
        fitting = fitting_kernels("auto", layer)
        for kernel in KERNELS if isinstance(fitting, str) else fitting:
            packed = kernel(layer)
            for first, rows in random_rows(packed):
                packed.pack_(first, rows)
            made.setdefault(kernel.name, []).append(packed)
    return made


def step(layers: list[Any], inputs: dict[int, Tensor], widths: list[int]) -> float:
    """Milliseconds of one product with each layer, the cast of x included."""
    started = time.perf_counter()
    for layer, width in zip(layers, widths, strict=True):
        x = inputs[width]
        if isinstance(layer, nn.Linear):
            layer(x)
        else:
            layer.linear(x.to(layer.activation_dtype)).to(x.dtype)
    return 1e3 * (time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "cpu_kernels", "--shape tiny --rows 1 --turns 1")
    add = parser.add_argument
    add("--shape", default="qwen2.5-0.5b", choices=list(SHAPES))
    add("--dtype", default="float32", choices=list(DTYPES), help="of the policy")
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 16])
    add("--turns", type=int, default=9, help="of each way")
    options = parser.read(arguments, "rows", "turns")
    machine = begin(options)
    count, projections, head = SHAPES[options.shape]
    shapes, dtype = [*(projections * count), head], DTYPES[options.dtype]
    widths = [shape[1] for shape in shapes]
    findings, cells = [], []
    with torch.inference_mode():
        ways: dict[str, list[Any]] = {"dense": [dense_layer(shape, dtype) for shape in shapes]}
        ways |= make_kernels(shapes, dtype)
        for rows in options.rows:
            inputs = {width: torch.randn(rows, width, dtype=dtype) for width in set(widths)}  # [rows, in] each
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _ in range(options.turns + 1):  # the first warms up
                for name, layers in ways.items():
                    body = step(layers[:-1], inputs, widths[:-1])
                    times[name].append((body, step(layers[-1:], inputs, widths[-1:])))
            found = {name: [median(part) for part in zip(*own[1:], strict=True)] for name, own in times.items()}
            parts = {name: {"layers": body, "head": last} for name, (body, last) in found.items()}
            cells.append({"rows": rows, "milliseconds": parts})
            for name, (body, last) in found.items():
                both = [sum(each) for each in times[name][1:]]
                findings.append(Finding(f"{rows} rows: {name}, layers", body, "ms"))
                findings.append(Finding(f"{rows} rows: {name}, head", last, "ms"))
                findings.append(Finding(f"{rows} rows: {name}, both", median(both), "ms", "", spread(both)))
    write_result(
        options.output, "quantization", "4-bit kernels on a CPU",
        f"Shape of {options.shape}, policy in {options.dtype}, groups of 128 (bitsandbytes, NF4: 64); medians of "
        f"{options.turns} turns, with the least and the most. The dense layers are those of the target.",
        machine, findings, {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
