"""The whole identity grid: every strategy, draft length, batch size and sampling against "none".

A row is identical where its tokens are, and where the model is exact (`statistics.exact`), each bit of their
log-probabilities. Any mismatch is a failure, but of tokens in float32 and bfloat16 where the model is not exact; the
exit status says the result.

    python -m benchmarks.identity_grid --models ../shared/models/bit-stories3M ../shared/models/stories260K \\
        --assistant ../shared/models/stories260K
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import spec_trl  # noqa: F401

from .measure import Finding, Options, begin, shown, write_result
from .models import DTYPES, load_model
from .workload import STORY_MODEL, Workload, prompt_source


NONE = '"none" with the same seed'
STRATEGIES = ("self", "model", "ngram", "history")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=0": {"do_sample": False},
    "T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "T=1, top-p 0.9": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9},
}


def generate(
    model: PreTrainedModel, inputs: dict[str, Tensor], sampling: dict[str, Any], new_tokens: int, strategy: str,
    draft_length: int = 5, **assistant: Any,
) -> Any:  # fmt: skip
    """One generation with seed 0 and its statistics; every row gets up to `new_tokens`."""
    # A fast kernel drafts for few rows only: in bfloat16 a copy would draft for none of seven.
    config = {"draft_length": draft_length, "seed": 0, "sd_toggle": "always", "draft_kernel": "reference"}
    return model.generate(
        **inputs, **sampling, **assistant, max_new_tokens=new_tokens, assistant_strategy=strategy,
        speculative_config=config, return_dict_in_generate=True,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    tiny = (
        f"--models {STORY_MODEL} --assistant {STORY_MODEL} --max-new-tokens 3 --draft-lengths 3 --batches 2 "
        "--dtypes bfloat16"
    )
    parser = Options(__doc__, "identity_grid", tiny)
    add = parser.add_argument
    add("--models", nargs="+", required=True, help="folders, or shape:NAME")
    add("--assistant", required=True, help='folder of the small model for strategy "model"')
    add("--dtypes", nargs="+", default=["float64", "float32", "bfloat16"], choices=list(DTYPES), help="of both models")
    add("--draft-lengths", type=int, nargs="+", default=[1, 3, 5, 8])
    add("--batches", type=int, nargs="+", default=[1, 7, 32], help="rows")
    add("--max-new-tokens", type=int, default=64, help="per row")
    parser.set_defaults(threads=1, device="cpu")
    options = parser.read(arguments, "draft_lengths", "batches", "max_new_tokens")
    machine = begin(options)
    cells: dict[str, dict[str, int]] = {}
    grid = list(itertools.product(options.models, options.dtypes, options.batches, SAMPLINGS))
    with tqdm(total=len(grid) * len(STRATEGIES) * len(options.draft_lengths)) as bar:
        for spec, name, batch, sampling in grid:
            loaded = load_model(spec, DTYPES[name], "cpu", measured=False)
            assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=DTYPES[name])
            prompts = prompt_source(loaded, None, batch, seed=batch)
            inputs = Workload(prompts, options.max_new_tokens, 1.0, (), 0).padded(torch.device("cpu"))

            run = functools.partial(generate, loaded.model, inputs, SAMPLINGS[sampling], options.max_new_tokens)
            reference = run("none")
            for strategy, draft_length in itertools.product(STRATEGIES, options.draft_lengths):
                more = {"assistant_model": assistant} if strategy == "model" else {}
                output = run(strategy, draft_length, **more)
                exact, same = output.statistics.exact, output.sequences.shape == reference.sequences.shape
                equal = (output.sequences == reference.sequences).all(1) if same else torch.zeros(batch).bool()  # [B]
                if same and exact is True:
                    equal &= (output.logprobs == reference.logprobs).all(1)
                what = f"{loaded.facts['model']}, {name}, {strategy}"
                cell = cells.setdefault(what, dict(rows=0, identical=0, tokens=0, drafted=0, accepted=0, failed=0))
                cell["rows"] += batch
                cell["identical"] += int(equal.sum())
                cell["tokens"] += output.statistics.tokens
                cell["drafted"] += output.statistics.total.drafted
                cell["accepted"] += output.statistics.total.accepted
                cell["failed"] += int((~equal).sum()) if exact is True or name == "float64" else 0
                bar.update()
    findings = [
        Finding(f"{name}: identical rows of {cell['rows']}, {cell['tokens']} tokens", cell["identical"], "rows", NONE)
        for name, cell in cells.items()
    ]
    write_result(
        options.output, "lossless", "Identity: the whole grid",
        f"Exact verification, draft length {options.draft_lengths} x batch {options.batches} x {list(SAMPLINGS)}, "
        f"{options.max_new_tokens} new tokens. Tokens are compared, and where a model is exact the bits of "
        "log-probabilities.",
        machine, None, findings, {"options": shown(options), "cells": cells},
    )  # fmt: skip
    if any(cell["failed"] for cell in cells.values()):
        raise SystemExit("rows differ")


if __name__ == "__main__":
    main()
