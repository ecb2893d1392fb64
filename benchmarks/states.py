"""Families whose layers keep states against transformers' own `generate`: whole greedy rollouts, the ways in turns.

Random float32 models of a few layers, as published configs mix them, show the work around the states: their products
are small. Processor seconds, all threads together, which other work on the machine disturbs least.

    python -m benchmarks.states --threads 1
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Lfm2Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from .calls import ratios, rotated
from .measure import Finding, Options, begin, fresh_cache, shown, spread, write_result


PLAIN = "generate"
COMMON: dict[str, Any] = dict(
    vocab_size=2048, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0,
    bos_token_id=1, eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen3.5": Qwen3_5TextConfig(
        **COMMON, hidden_size=256, intermediate_size=768, num_hidden_layers=8, head_dim=64, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "Falcon-H1": FalconH1Config(
        **COMMON, hidden_size=256, intermediate_size=768, num_hidden_layers=6, head_dim=64, mamba_d_ssm=512,
        mamba_n_heads=16, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=64, mamba_chunk_size=64,
    ),
    "LFM2": Lfm2Config(
        **COMMON, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "full_attention"],
    ),
}  # fmt: skip


def seconds(model: PreTrainedModel, prompts: Tensor, new: int, way: str) -> float:
    """Processor seconds of a call; `prompts` `[rows, length]` int64."""
    options: dict[str, Any] = {} if way == PLAIN else {"assistant_strategy": way}
    mask, started = torch.ones_like(prompts), time.process_time()
    model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=new, **options)
    return time.process_time() - started


def main(arguments: Sequence[str] | None = None) -> None:
    quick = "--families LFM2 --rows 1 --new-tokens 4 --calls 2 --strategies none"
    parser = Options(__doc__, "states", quick)
    add = parser.add_argument
    add("--families", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    add("--rows", type=int, nargs="+", default=[1, 4, 16])
    add("--strategies", nargs="+", default=["none", "self"], choices=["none", "self", "ngram", "auto"])
    add("--calls", type=int, default=7, help="of each way, after one that warms up")
    add("--prompt-tokens", type=int, default=24)
    add("--new-tokens", type=int, default=64)
    options = parser.read(arguments, "rows", "prompt_tokens", "new_tokens")
    parser.at_least(2, options, "calls")
    machine, findings, cells = begin(options), list[Finding](), []
    ways = [PLAIN, *options.strategies]
    with fresh_cache():
        for family in options.families:
            torch.manual_seed(options.seed)
            model = AutoModelForCausalLM.from_config(CONFIGS[family]).to(options.device).eval()
            for rows in options.rows:
                prompts = torch.randint(2, 2048, (rows, options.prompt_tokens)).to(options.device)
                taken: dict[str, list[float]] = {way: [] for way in ways}
                for turn in range(1 + options.calls):
                    for way in rotated(ways, turn):
                        taken[way].append(seconds(model, prompts, options.new_tokens, way))
                cells.append({"family": family, "rows": rows, "seconds": {way: of[1:] for way, of in taken.items()}})
                for way in options.strategies:
                    gains = ratios(taken[PLAIN][1:], taken[way][1:])
                    what = f"{family}, {rows} rows: {way}"
                    findings.append(Finding(what, median(gains), "×", PLAIN, spread(gains)))
    write_result(
        options.output, "rollouts", "Families whose layers keep states",
        f"Random models, float32, greedy; prompts of {options.prompt_tokens} tokens, {options.new_tokens} new ones. "
        f"Processor time of `{PLAIN}` over the way's; median, least and most of {options.calls} turns.",
        machine, options.calls, findings, {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
