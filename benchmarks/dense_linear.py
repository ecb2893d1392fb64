"""Dense layers on a CPU, as a shadow multiplies: our C++, which generated tokens take, against torch: oneDNN in
float32, `F.linear` in bfloat16.

They run in turns on the same weights, copies of them one after the other, so that no cache holds them; a ratio is of
the medians.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_trl.native import cpu_products
from spec_trl.native.cpu_products import multiply_by_onednn

from .measure import Finding, Options, begin, shown, spread, times_in_turns, write_result


MOST_COPIES = 64
COLD = 1 << 26  # bytes that copies of a weight take together, more than caches hold
SHAPES = ((64, 64), (172, 64), (192, 192), (512, 192), (512, 512), (4096, 192), (4864, 896), (32000, 288))  # (out, in)
ROWS = (1, 4, 16, 64, 256)
DTYPES = torch.float32, torch.bfloat16
TURN = 0.02  # seconds that one turn lasts at least, much more than the clock's resolution


def seconds(multiply: Callable[[], Tensor]) -> float:
    """Of one call, on average over a turn."""
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < TURN or not calls:
        multiply()
        calls += 1
    return (time.perf_counter() - started) / calls


def measure(shape: tuple[int, int], rows: int, dtype: torch.dtype, turns: int) -> dict[str, Any]:
    """Microseconds of each."""
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    copies = itertools.cycle([weight, *(weight.clone() for _ in range(min(COLD // weight.nbytes, MOST_COPIES)))])
    ways: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: (
            multiply_by_onednn(x, next(copies), None) if dtype == torch.float32 else F.linear(x, next(copies))
        ),
        "ours": lambda: cpu_products.multiply_matrix(cpu_products.dense_matrix(next(copies), None), x),
    }
    works = {name: partial(seconds, multiply) for name, multiply in ways.items()}
    microseconds = {name: 1e6 * each for name, each in times_in_turns(works, turns).items()}
    return {"shape": list(shape), "rows": rows, "dtype": str(dtype), "microseconds": microseconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "dense_linear", "--turns 1 --rows 1 4 --largest 65536")
    parser.add_argument("--turns", type=int, default=5, help="of each way")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--largest", type=int, default=1 << 30, help="weights of a layer")
    options = parser.read(arguments, "turns")
    machine = begin(options)
    with torch.inference_mode():
        shapes = [shape for shape in SHAPES if shape[0] * shape[1] <= options.largest]
        grid = itertools.product(shapes, options.rows, DTYPES)
        cells = [measure(shape, rows, dtype, options.turns) for shape, rows, dtype in grid]
    findings = []
    for dtype, rows in itertools.product(DTYPES, options.rows):
        own = [cell["microseconds"] for cell in cells if (cell["rows"], cell["dtype"]) == (rows, str(dtype))]
        gains = [cell["torch"] / cell["ours"] for cell in own]
        name = f"speed of ours, {str(dtype).removeprefix('torch.')}, rows: {rows}"
        findings.append(Finding(name, median(gains), "×", "torch", spread(gains)))
    write_result(
        options.output, "rollouts", "Dense layers by our C++ and by torch",
        f"{len(shapes)} shapes from 64 × 64 to {shapes[-1][0]} × {shapes[-1][1]}, {tuple(options.rows)} rows; "
        f"medians of {options.turns} turns. Median "
        "over shapes, with the lowest and the highest.",
        machine, options.turns, findings, {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
