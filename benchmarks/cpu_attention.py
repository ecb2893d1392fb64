"""Attention on a CPU: our C++ under spans against torch's SDPA under a mask, as `ragged_attention` calls either.

Both run in turns on the same random queries, keys and values; a ratio is of the medians.
"""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from spec_trl.generation.engine.network.attention import MaskPlan, ragged_attention

from .measure import Finding, Options, begin, shown, spread, times_in_turns, write_result
from .models import DTYPES


PLAN = MaskPlan(("full_attention",), False, 0, 0)
COLUMNS = 1024  # of the cache
LENGTHS = ((1000, 1000), (200, 200), (6, 1000), (1, 1000))  # tokens per row, the last of so many
HEADS = ((9, 3), (8, 8))  # of queries, of keys


def measure(
    count: int, columns: int, size: int, heads: int, kv_heads: int, rows: int, dtype: torch.dtype, turns: int
) -> dict[str, Any]:
    """Milliseconds of each."""
    query = torch.randn(rows, count, heads, size).to(dtype).transpose(1, 2)  # [B, heads, q, d]
    cache = torch.randn(2, rows, kv_heads, COLUMNS, size).to(dtype)
    key, value = cache[..., : -(-columns // 32) * 32, :]  # [B, kv_heads, columns, d] each
    positions = torch.arange(columns - count, columns).expand(rows, -1)  # [B, q]
    masks: dict[str, Any] = {"SDPA": PLAN.build(positions, key.shape[2], dtype), "ours": PLAN.spans(positions)}

    def work(mask: Any) -> float:
        started = time.perf_counter()
        ragged_attention(nn.Module(), query, key, value, mask)
        return 1e3 * (time.perf_counter() - started)

    milliseconds = times_in_turns({name: partial(work, mask) for name, mask in masks.items()}, turns)
    sizes = dict(tokens=count, columns=columns, head_size=size, heads=heads, kv_heads=kv_heads, rows=rows)
    return sizes | {"dtype": str(dtype).removeprefix("torch."), "milliseconds": milliseconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "cpu_attention", "--turns 1 --rows 1 --head-sizes 16 --threads 1")
    parser.add_argument("--turns", type=int, default=7, help="of each way")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128])
    options = parser.read(arguments, "turns", "rows")
    machine = begin(options)
    cells: list[dict[str, Any]] = []
    grid = itertools.product(sorted({1, torch.get_num_threads()}), LENGTHS, options.head_sizes, HEADS, options.rows)
    with torch.inference_mode():
        for threads, (count, columns), size, (heads, kv_heads), rows in grid:
            torch.set_num_threads(threads)
            for name in ("float32", "bfloat16"):
                cell = measure(count, columns, size, heads, kv_heads, rows, DTYPES[name], options.turns)
                cells.append(cell | {"threads": threads})
    findings = []
    for name, (count, columns) in itertools.product(("float32", "bfloat16"), LENGTHS):
        own = [cell["milliseconds"] for cell in cells if (cell["dtype"], cell["tokens"]) == (name, count)]
        gains = [cell["SDPA"] / cell["ours"] for cell in own]
        what = f"speed of ours in {name}, {count} tokens over {columns} columns"
        findings.append(Finding(what, median(gains), "×", "SDPA", spread(gains)))
    write_result(
        options.output, "rollouts", "Attention on a CPU by our C++",
        f"Heads {HEADS} (of queries, of keys) of sizes {options.head_sizes}, {options.rows} rows, with one thread and "
        f"all; medians of {options.turns} turns. Median over cells, with the lowest and the highest.",
        machine, options.turns, findings, {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
