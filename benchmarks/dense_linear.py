"""Dense layers in float32 on a CPU, as a shadow multiplies: our C++ and oneDNN against torch's `F.linear`.

All run in turns on the same weights, copies of them one after the other, so that no cache holds them; a ratio
is of the medians. Up to `MOST_ROWS` rows of `spec_trl/cpu_products.py` our product is taken, and from
`ONEDNN_MULTIPLICATIONS` of `spec_trl/dense_linear.py` on oneDNN's.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_trl import cpu_products
from spec_trl.dense_linear import ONEDNN_MULTIPLICATIONS, multiply_by_onednn

from .measure import Finding, add_machine_arguments, begin, shown, write_result


MOST_COPIES = 64
COLD = 1 << 26  # bytes that copies of a weight take together, more than caches hold
SHAPES = ((64, 64), (172, 64), (192, 192), (512, 192), (512, 512), (4096, 192), (4864, 896), (32000, 288))  # (out, in)
ROWS = (1, 4, 8, 16, 32, 64)
TURN = 0.02  # seconds that one turn lasts at least, much more than the clock's resolution


def seconds(multiply: Callable[[], Tensor]) -> float:
    """Of one call, on average over a turn."""
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < TURN or not calls:
        multiply()
        calls += 1
    return (time.perf_counter() - started) / calls


def measure(shape: tuple[int, int], rows: int, turns: int) -> dict[str, Any]:
    """Microseconds of each."""
    weight, x = torch.randn(shape), torch.randn(rows, shape[1])
    copies = itertools.cycle([weight, *(weight.clone() for _ in range(min(COLD // weight.nbytes, MOST_COPIES)))])
    ways: dict[str, Callable[[], Tensor]] = {
        "F.linear": lambda: F.linear(x, next(copies)),
        "oneDNN": lambda: multiply_by_onednn(x, next(copies), None),
        "ours": lambda: cpu_products.multiply(cpu_products.dense_matrix(next(copies), None), x),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns + 1):  # the first warms up
        for name, multiply in ways.items():
            found[name].append(seconds(multiply))
    microseconds = {name: 1e6 * median(times[1:]) for name, times in found.items()}
    return {"shape": list(shape), "rows": rows, "multiplications": rows * weight.numel(), "microseconds": microseconds}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each way (default: %(default)s)")
    add_machine_arguments(parser, "dense_linear")
    options = parser.parse_args(arguments)
    machine = begin(options)
    with torch.inference_mode():
        cells = [measure(shape, rows, options.turns) for shape in SHAPES for rows in ROWS]
    findings = []
    for name, is_in in (
        ("below the limit", lambda count: count < ONEDNN_MULTIPLICATIONS),
        ("from the limit on", lambda count: count >= ONEDNN_MULTIPLICATIONS),
    ):
        own = [cell["microseconds"] for cell in cells if is_in(cell["multiplications"])]
        gains = [cell["F.linear"] / cell["oneDNN"] for cell in own]
        findings.append(Finding(f"speed of oneDNN, {name}", median(gains), "×", "F.linear", (min(gains), max(gains))))
    for few in (1, 4, 16, 64):
        own = [cell["microseconds"] for cell in cells if cell["rows"] == few and cell["multiplications"] >= 1 << 17]
        gains = [cell["oneDNN"] / cell["ours"] for cell in own]
        findings.append(Finding(f"speed of ours, rows: {few}", median(gains), "×", "oneDNN", (min(gains), max(gains))))
    write_result(
        options.output, "rollouts", "Dense layers by oneDNN and by our C++",
        f"{len(SHAPES)} shapes from 64 × 64 to 32000 × 288, {ROWS} rows, float32; medians of {options.turns} turns; "
        f"the limit is {ONEDNN_MULTIPLICATIONS} multiplications. Median over cells, with the lowest and the highest.",
        machine, findings, {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
