"""The whole identity grid: every strategy, draft length, batch size and sampling against "none".

A row is identical where its tokens are, and where the model is exact (`statistics.exact`), each bit of their
log-probabilities. Any mismatch is a failure, but of tokens in float32 and bfloat16 where the model is not exact; the
exit status says the result.

    python -m benchmarks.identity_grid --models ../shared/models/bit-stories3M ../shared/models/stories260K \\
        --assistant ../shared/models/stories260K
"""

import argparse
import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import spec_trl  # noqa: F401

from .measure import Finding, add_machine_arguments, begin, shown, write_result
from .models import DTYPES, load_model
from .workload import Workload, prompt_source


NONE = '"none" with the same seed'
STRATEGIES = ("self", "model", "ngram", "history")
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


def findings(result: dict[str, Any]) -> list[Finding]:
    """Rows that are those of "none"."""
    return [
        Finding(f"{name}: identical rows of {cell['rows']}, {cell['tokens']} tokens", cell["identical"], "rows", NONE)
        for name, cell in result["cells"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="folders, or shape:NAME")
    parser.add_argument("--assistant", required=True, help='folder of the small model for strategy "model"')
    parser.add_argument("--dtypes", nargs="+", default=["float64", "float32", "bfloat16"], choices=list(DTYPES))
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per row (default: %(default)s)")
    add_machine_arguments(parser, "identity_grid")
    parser.set_defaults(threads=1, device="cpu")
    arguments = parser.parse_args()
    machine = begin(arguments)
    cells: dict[str, dict[str, int]] = {}
    grid = list(itertools.product(arguments.models, arguments.dtypes, BATCHES, SAMPLINGS))
    with tqdm(total=len(grid) * len(STRATEGIES) * len(DRAFT_LENGTHS)) as bar:
        for spec, name, batch, sampling in grid:
            loaded = load_model(spec, DTYPES[name], "cpu", measured=False)
            assistant = AutoModelForCausalLM.from_pretrained(arguments.assistant, dtype=DTYPES[name])
            prompts = prompt_source(loaded, None, batch, seed=batch)
            inputs = Workload(prompts, arguments.max_new_tokens, 1.0, (), 0).padded(torch.device("cpu"))

            run = functools.partial(generate, loaded.model, inputs, SAMPLINGS[sampling], arguments.max_new_tokens)
            reference = run("none")
            for strategy, draft_length in itertools.product(STRATEGIES, DRAFT_LENGTHS):
                more = {"assistant_model": assistant} if strategy == "model" else {}
                output = run(strategy, draft_length, **more)
                exact, same = output.statistics.exact, output.sequences.shape == reference.sequences.shape
                equal = (output.sequences == reference.sequences).all(1) if same else torch.zeros(batch).bool()  # [B]
                if same and exact is True:
                    equal &= (output.logprobs == reference.logprobs).all(1)
                what = f"{loaded.facts['model']}, {name}, {strategy}"
                cell = cells.setdefault(what, dict(rows=0, identical=0, tokens=0, accepted=0, failed=0))
                cell["rows"] += batch
                cell["identical"] += int(equal.sum())
                cell["tokens"] += output.statistics.tokens
                cell["accepted"] += output.statistics.total.accepted
                cell["failed"] += int((~equal).sum()) if exact is True or name == "float64" else 0
                bar.update()
    axes = f"draft length {DRAFT_LENGTHS} x batch {BATCHES} x {list(SAMPLINGS)}, {arguments.max_new_tokens} new tokens"
    result = {"options": shown(arguments), "axes": axes, "cells": cells}
    title = "Identity: the whole grid"
    setup = f"Exact verification, {axes}. Tokens are compared, and where a model is exact the bits of log-probabilities."
    write_result(arguments.output, "lossless", title, setup, machine, findings(result), result)
    raise SystemExit(any(cell["failed"] for cell in cells.values()))


if __name__ == "__main__":
    main()
