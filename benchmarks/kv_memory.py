"""Memory of K/V for rows whose lengths have a long tail, against a cache that is taken at once.

A random model with the K/V heads of Qwen2.5-7B and few layers decodes rows that a criterion ends at lengths drawn from
a log-normal distribution. K/V of one layer is like that of another, so a share of the whole holds for any number of
layers.
"""

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from .measure import Finding, add_machine_arguments, begin, peak_memory, shown, write_result


PROMPT = 16  # tokens, which tell rows apart


class EndsAt(StoppingCriteria):
    """Ends the row of prompt b after `lengths[b]` new tokens."""

    prefix_only = True

    def __init__(self, prompts: Tensor, lengths: list[int]) -> None:
        self._lengths = {tuple(prompt): length for prompt, length in zip(prompts.tolist(), lengths, strict=True)}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        wanted = [self._lengths[tuple(prompt)] for prompt in input_ids[:, :PROMPT].tolist()]
        return input_ids.shape[1] - PROMPT >= torch.tensor(wanted, device=input_ids.device)  # [B]


def drawn_lengths(rows: int, limit: int, sigma: float, seed: int) -> list[int]:
    """Lengths of `rows`, log-normal up to `limit`, an eighth of it on average."""
    drawn = np.random.default_rng(seed).lognormal(0.0, sigma, rows)
    low, high = 0.0, float(limit)
    for _ in range(60):  # bisection: the mean grows with the scale
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(drawn * scale, 1, limit).mean() < limit / 8 else (low, scale)
    return np.clip(drawn * scale, 1, limit).round().astype(int).tolist()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--limit", type=int, default=2048, help="most new tokens of a row (default: %(default)s)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal lengths (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    add_machine_arguments(parser, "kv_memory")
    options = parser.parse_args(arguments)
    machine, device = begin(options), torch.device(options.device)
    torch.manual_seed(options.seed)
    config = Qwen2Config(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=4, head_dim=128, max_position_embeddings=2 * options.limit,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(device, torch.bfloat16).eval()
    prompts = torch.randint(512, (options.rows, PROMPT), device=device)
    lengths = drawn_lengths(options.rows, options.limit, options.sigma, options.seed)
    with peak_memory(device) as peak:
        found = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=options.limit,
            eos_token_id=None, pad_token_id=0, stopping_criteria=StoppingCriteriaList([EndsAt(prompts, lengths)]),
            assistant_strategy="none", speculative_config={"seed": options.seed}, return_dict_in_generate=True,
        )  # fmt: skip
    if found.lengths.tolist() != lengths:
        raise RuntimeError("rows did not end where they had to")
    column = 2 * options.layers * config.num_key_value_heads * 128 * torch.bfloat16.itemsize
    at_once = options.rows * (PROMPT + options.limit) * column
    used = found.statistics.cache_bytes
    write_result(
        options.output, "rollouts", "Memory of K/V",
        f"{options.rows} rows of up to {options.limit} new tokens, {sum(lengths) / options.rows:.0f} on average "
        f'(log-normal, σ = {options.sigma:g}; longest {max(lengths)}), strategy "none"; {options.layers} layers of 4 '
        "K/V heads of 128 in bfloat16. The peak of the process is above its size before, activations included.",
        machine,
        [
            Finding("K/V when there was most of it", used / at_once, "×", "rows × limit"),
            Finding("the same, bytes", used / 2**20, "MiB"),
            Finding("rows × limit, bytes", at_once / 2**20, "MiB"),
            Finding("peak of the process", peak.value / 2**20, "MiB"),
        ],
        {"options": shown(options), "lengths": sorted(lengths), "preemptions": found.statistics.preemptions},
    )  # fmt: skip


if __name__ == "__main__":
    main()
