"""The first call must not lose: `generate(assistant_strategy=...)` with its defaults, when nothing is known yet.

Before each first call all that is kept for the model is released: no packed copy, no profile, no measured round. A
second call follows on what the first one left. Both are compared with `"none"` and with transformers' own `generate`
on the same prompts, in turns; ratios are medians over repeats of tokens/s within a repeat, of whole calls.

    python -m benchmarks.first_call
    python -m benchmarks.first_call --models shape:qwen2.5-0.5b,float32 --batch 1 --strategies self --repeats 3
"""

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import spec_trl
from spec_trl.generation.configuration import STRATEGIES

from .measure import RESULTS, describe_machine, machine_line, markdown_table, stopwatch, write_result
from .models import DTYPES, load_model
from .never_slower import TARGETS
from .rollout import sampling
from .workload import Workload, end_tokens, prompt_source


PLAIN, NONE = "generate", "none"


def measure(target: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of one model."""
    spec, dtype = target.rsplit(",", 1)
    loaded = load_model(spec, DTYPES[dtype], options.device, options.agreement, options.seed)
    model, eos = loaded.model, end_tokens(loaded, ignore_eos=True)
    prompts = prompt_source(loaded, options.prompts, max(options.batch), options.seed)
    pad = model.generation_config.pad_token_id or 0
    cells = []
    for batch in options.batch:
        work = Workload(prompts[:batch], options.new_tokens, 1.0, eos, pad)
        ways: dict[str, Callable[[int], float]] = {
            name: partial(rate, model, work, name) for name in (PLAIN, NONE, *options.strategies)
        }
        for way in (PLAIN, NONE):
            ways[way](0)  # what the process prepares once
        rates: dict[str, list[float]] = {}
        for repeat in tqdm(range(options.repeats), f"{Path(spec).name}, batch {batch}"):
            for name in list(ways)[repeat % len(ways) :] + list(ways)[: repeat % len(ways)]:
                spec_trl.release(model)
                rates.setdefault(name, []).append(ways[name](options.seed + repeat))
                if name in options.strategies:
                    rates.setdefault(f"{name}, second call", []).append(ways[name](options.seed + repeat))
        ratios = {
            name: {against: statistics.median(a / b for a, b in zip(found, rates[against], strict=True))
                   for against in (PLAIN, NONE)}
            for name, found in rates.items() if name not in (PLAIN, NONE)
        }  # fmt: skip
        cells.append({"model": Path(spec).name, "dtype": dtype, "batch": batch, "rates": rates, "ratios": ratios})
    return cells


def rate(model: PreTrainedModel, work: Workload, strategy: str, seed: int) -> float:
    """Tokens per second of one call."""
    inputs = work.padded(model.device)
    options: dict[str, Any] = {}
    if strategy != PLAIN:
        options = dict(assistant_strategy=strategy, speculative_config={"seed": seed})
    with stopwatch(model.device) as watch:
        model.generate(**inputs, **sampling(work), **options)
    return len(work.prompts) * work.max_new_tokens / watch.value


def report(result: dict[str, Any]) -> str:
    """Markdown."""
    rows = [
        [f"{cell['model']}, {cell['dtype']}", str(cell["batch"]), name, f"{of[NONE]:.2f}×", f"{of[PLAIN]:.2f}×"]
        for cell in result["cells"]
        for name, of in cell["ratios"].items()
    ]
    machine = result["machine"]
    return "\n".join(
        [
            "# The first call with the defaults",
            "",
            f"{machine_line(machine)}. {result['options']['new_tokens']} new tokens per row, "
            f"{result['options']['repeats']} repeats. Command: `{result['command']}`.",
            "",
            markdown_table(["model", "batch", "call", 'over "none"', "over `generate`"], rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=TARGETS, metavar="MODEL,DTYPE", help="folder or shape:NAME, and a dtype")
    add("--strategies", nargs="+", default=["self"], choices=[name for name in STRATEGIES if name != NONE])
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy (%(default)s)")
    add("--batch", type=int, nargs="+", default=[1, 4], help="rows (default: %(default)s)")
    add("--new-tokens", type=int, default=96, help="per row (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each cell (default: %(default)s)")
    add("--prompts", type=Path, help="JSON list of strings")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "first_call.json", help="the .md goes next to it (%(default)s)")
    options = parser.parse_args()
    if min(*options.batch, options.repeats, options.new_tokens) < 1:
        parser.error(f"--batch {options.batch}, --repeats and --new-tokens must be 1 or more")
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message=".*max_new_tokens.*")
    started, machine = time.perf_counter(), describe_machine(torch.device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPEC_TRL_CACHE"] = folder  # no profile of an earlier run
        cells = [cell for target in options.models for cell in measure(target, options)]
    shown = {name: value for name, value in vars(options).items() if name not in ("output", "prompts", "models")}
    command = shlex.join(["python", "-m", "benchmarks.first_call", *sys.argv[1:]])
    result: dict[str, Any] = {
        "machine": machine, "options": shown, "command": command, "cells": cells,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip
    write_result(options.output, result, report(result))


if __name__ == "__main__":
    main()
