"""The whole identity grid in float64: every strategy, draft length, batch size and sampling against "none".

Any mismatch is a failure (design: exact verification is token-identical), so the exit status says the result.

    python -m benchmarks.identity_grid --models ../shared/models/bit-stories3M ../shared/models/stories260K \\
        --assistant ../shared/models/stories260K
"""

import argparse
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import spec_trl  # noqa: F401

from .measure import describe_machine, machine_line, markdown_table, write_result
from .models import load_model
from .workload import Workload, prompt_source


RESULTS = Path(__file__).parent / "results"
STRATEGIES = ("self", "model", "ngram")
DRAFT_LENGTHS = (1, 3, 5, 8)
BATCHES = (1, 7, 32)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=0": {"do_sample": False},
    "T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "T=1, top-p 0.9": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9},
}


def generate(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    sampling: dict[str, Any],
    new_tokens: int,
    strategy: str,
    draft_length: int = 5,
    **assistant: Any,
) -> Any:
    """One generation with seed 0 and its statistics; every row gets up to `new_tokens`."""
    return model.generate(
        **inputs,
        **sampling,
        **assistant,
        max_new_tokens=new_tokens,
        assistant_strategy=strategy,
        speculative_config={"draft_length": draft_length, "seed": 0, "sd_toggle": "always"},
        return_dict_in_generate=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="folders, or shape:NAME")
    parser.add_argument("--assistant", required=True, help='folder of the small model for strategy "model"')
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS / "identity_grid.json", help="(default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cells: dict[str, dict[str, int]] = {}
    grid = list(itertools.product(arguments.models, BATCHES, SAMPLINGS))
    with tqdm(total=len(grid) * len(STRATEGIES) * len(DRAFT_LENGTHS)) as bar:
        for spec, batch, sampling in grid:
            loaded = load_model(spec, torch.float64, "cpu", measured=False)
            assistant = AutoModelForCausalLM.from_pretrained(arguments.assistant, dtype=torch.float64)
            prompts = prompt_source(loaded, None, batch, seed=batch)
            inputs = Workload(prompts, arguments.max_new_tokens, 1.0, (), 0).padded(torch.device("cpu"))

            run = functools.partial(generate, loaded.model, inputs, SAMPLINGS[sampling], arguments.max_new_tokens)
            reference = run("none")
            for strategy, draft_length in itertools.product(STRATEGIES, DRAFT_LENGTHS):
                more = {"assistant_model": assistant} if strategy == "model" else {}
                output = run(strategy, draft_length, **more)
                same = output.sequences.shape == reference.sequences.shape
                equal = (output.sequences == reference.sequences).all(1).sum().item() if same else 0
                cell = cells.setdefault(f"{loaded.facts['model']}, {strategy}", dict(rows=0, identical=0, tokens=0))
                cell["rows"] += batch
                cell["identical"] += int(equal)
                cell["tokens"] += output.statistics.tokens
                cell["accepted"] = cell.get("accepted", 0) + output.statistics.total.accepted
                bar.update()
    machine = describe_machine(torch.device("cpu"))
    table = markdown_table(
        ["model, strategy", "rows", "identical", "tokens compared", "of them drafted and accepted"],
        [[name, *map(str, cell.values())] for name, cell in cells.items()],
    )
    axes = f"draft length {DRAFT_LENGTHS} x batch {BATCHES} x {list(SAMPLINGS)}, {arguments.max_new_tokens} new tokens"
    report = f"# Identity grid, float64, exact verification\n\n{machine_line(machine)}\n\n{axes}\n\n{table}\n"
    write_result(arguments.output, {"machine": machine, "axes": axes, "cells": cells}, report)
    raise SystemExit(any(cell["rows"] != cell["identical"] for cell in cells.values()))


if __name__ == "__main__":
    main()
