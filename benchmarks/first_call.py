"""The first call must not lose: `generate(assistant_strategy=...)` with its defaults, when nothing is known yet.

Before each first call all that is kept for the model is released: no packed copy, no profile, no measured round. A
second call follows on what the first one left. Both are compared with `"none"` and with transformers' own `generate`
on the same prompts, in turns; ratios are medians over repeats of tokens/s within a repeat, of whole calls. So are the
seconds that the first call takes longer than `"none"`, of which the highest repeat has what a process prepares once.

    python -m benchmarks.first_call
    python -m benchmarks.first_call --models shape:qwen2.5-0.5b,float32 --batch 1 --strategies self --repeats 3
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from spec_trl.generation.registry import strategies

from .calls import forget, ratios, rotated, sampling
from .measure import Finding, add_machine_arguments, begin, shown, stopwatch, write_result
from .models import DTYPES, load_model, model_line
from .workload import STORY_MODEL, Workload, end_tokens, prompt_source


TARGETS = [f"{STORY_MODEL},float32", "shape:qwen2.5-0.5b,bfloat16"]
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
            for name in rotated(list(ways), repeat):
                forget(model)
                rates.setdefault(name, []).append(ways[name](options.seed + repeat))
                if name in options.strategies:
                    rates.setdefault(f"{name}, second call", []).append(ways[name](options.seed + repeat))
        medians = {
            name: {against: statistics.median(ratios(found, rates[against])) for against in (PLAIN, NONE)}
            for name, found in rates.items() if name not in (PLAIN, NONE)
        }  # fmt: skip
        tokens = batch * options.new_tokens
        more = {
            name: [tokens / own - tokens / none for own, none in zip(rates[name], rates[NONE], strict=True)]
            for name in options.strategies
        }
        cells.append(
            {"model": Path(spec).name, "dtype": dtype, "batch": batch, "rates": rates, "ratios": medians,
             "more_seconds": more}
        )  # fmt: skip
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


def findings(result: dict[str, Any]) -> list[Finding]:
    """Each call over `none` and over `generate`, and the seconds that the first one takes longer."""
    found = []
    for cell in result["cells"]:
        for name, more in cell["more_seconds"].items():
            what = f"{model_line(cell)}, batch {cell['batch']}: {name}, longer than"
            found.append(Finding(what, statistics.median(more), "s", NONE, (min(more), max(more))))
        for name, own in cell["ratios"].items():
            for against, ratio in own.items():
                passes = ratios(cell["rates"][name], cell["rates"][against])
                what = f"{model_line(cell)}, batch {cell['batch']}: {name}"
                found.append(Finding(what, ratio, "×", against, (min(passes), max(passes))))
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured."""
    options = result["options"]
    return (
        f"Defaults of every option, {options['new_tokens']} new tokens per row; everything kept for the model is "
        f"released before each first call. Tokens/s of whole calls within a repeat: median of {options['repeats']} "
        "repeats in turns, lowest and highest."
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=TARGETS, metavar="MODEL,DTYPE", help="folder, wide:FOLDER*k, shape:NAME; dtype")
    add("--strategies", nargs="+", default=["self"], choices=[name for name in strategies() if name != NONE])
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy (%(default)s)")
    add("--batch", type=int, nargs="+", default=[1, 4], help="rows (default: %(default)s)")
    add("--new-tokens", type=int, default=96, help="per row (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each cell (default: %(default)s)")
    add("--prompts", type=Path, help="JSON list of strings")
    add_machine_arguments(parser, "first_call")
    options = parser.parse_args()
    if min(*options.batch, options.repeats, options.new_tokens) < 1:
        parser.error(f"--batch {options.batch}, --repeats and --new-tokens must be 1 or more")
    return options


def main() -> None:
    options = parse_arguments()
    machine, started = begin(options), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPEC_TRL_CACHE"] = folder  # no profile of an earlier run
        cells = [cell for target in options.models for cell in measure(target, options)]
    result = {"options": shown(options), "cells": cells, "seconds": time.perf_counter() - started}
    title = "The first call with the defaults"
    write_result(options.output, "never_slower", title, setup(result), machine, findings(result), result)


if __name__ == "__main__":
    main()
