"""What a call costs beside its forwards: one greedy token of one row, against transformers' own `generate`.

Processor seconds of whole calls, each way's in turns, once the first calls have made what is kept. Random Llamas of a
tiny width show the calls of Python alone; a checkpoint shows their share beside real weights.

    python -m benchmarks.one_token --threads 1
    python -m benchmarks.one_token --threads 1 --layers --models ../shared/models/SmolLM2-135M-Instruct
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spec_trl.generation.registry import strategies

from .calls import rotated
from .measure import Finding, Options, begin, fresh_cache, shown, write_result
from .models import check_targets, load_model


PLAIN = "generate"
WARM_UPS = 4  # calls of each way, of which the first packs, probes and compiles
VOCABULARY = 512  # tokens of random prompts, fewer than any checkpoint's


def tiny_llama(layers: int, seed: int) -> LlamaForCausalLM:
    """A random float32 Llama, 64 wide."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


def seconds(model: PreTrainedModel, prompt: Tensor, way: str) -> float:
    """Processor seconds of a call, all threads together; `prompt` `[1, length]` int64."""
    options: dict[str, Any] = {} if way == PLAIN else {"assistant_strategy": way}
    mask, started = torch.ones_like(prompt), time.process_time()
    model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=1, pad_token_id=0, **options)
    return time.process_time() - started


def measure(name: str, model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each way."""
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(3, VOCABULARY, (1, options.prompt_tokens), generator=generator).to(model.device)
    ways = [PLAIN, *options.strategies]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(WARM_UPS + options.calls):
        for way in rotated(ways, turn):
            found[way].append(1e3 * seconds(model, prompt, way))
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return {"model": name, "layers": layers, "milliseconds": {way: own[WARM_UPS:] for way, own in found.items()}}


def findings(cells: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Each way's median over that of `generate`, with the quartiles of its calls."""
    found = []
    for cell in cells:
        plain = median(cell["milliseconds"][PLAIN])
        for way, own in cell["milliseconds"].items():
            what = f"{cell['model']}, {cell['layers']} layers: {way}"
            if way == PLAIN:
                found.append(Finding(what, plain, "ms"))
            else:
                low, middle, high = quantiles(own)
                found.append(Finding(what, middle / plain, "×", PLAIN, (low / plain, high / plain)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "one_token", "--layers 1 --calls 2 --strategies none auto")
    add = parser.add_argument
    add("--layers", type=int, nargs="*", default=[2, 28], help="of random Llamas, 64 wide")
    add("--models", nargs="*", default=[], metavar="MODEL", help="in float32: folder or shape:NAME")
    add("--strategies", nargs="+", default=["none", "self", "auto"], choices=strategies())
    add("--calls", type=int, default=100, help="of each way")
    add("--prompt-tokens", type=int, default=16)
    options = parser.read(arguments, "layers", "prompt_tokens")
    parser.at_least(2, options, "calls")
    check_targets(parser, [f"{spec},float32" for spec in options.models])
    machine = begin(options)
    with fresh_cache():  # no profile of an earlier run
        cells = [
            measure("random Llama, 64 wide", tiny_llama(layers, options.seed).to(options.device), options)
            for layers in options.layers
        ]
        for spec in options.models:
            loaded = load_model(spec, torch.float32, options.device, seed=options.seed, measured=False)
            cells.append(measure(str(loaded.facts["model"]), loaded.model, options))
    write_result(
        options.output, "rollouts", "A call for one token",
        f"One greedy token of one row of {options.prompt_tokens} tokens, float32, defaults of every option. Processor "
        f"time of whole calls: medians of {options.calls} in turns, and quartiles, over the median of `{PLAIN}`.",
        machine, options.calls, findings(cells), {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
