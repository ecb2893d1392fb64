"""Memory of K/V for rows whose lengths have a long tail, against a cache that is taken at once.

A random model with the K/V heads of Qwen2.5-7B and few layers decodes rows that a criterion ends at lengths drawn from
a log-normal distribution. Once all rows start together, and once waiting requests take the place of rows that have
ended. K/V of one layer is like that of another, so a share of the whole holds for any number of layers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from .measure import Finding, Options, begin, shown, write_result


PROMPT = 16  # tokens, which tell rows apart


class EndsAt(StoppingCriteria):
    """Ends the row of prompt b after `lengths[b]` new tokens."""

    prefix_only = True

    def __init__(self, prompts: Tensor, lengths: list[int]) -> None:
        self._lengths = {tuple(prompt): length for prompt, length in zip(prompts.tolist(), lengths, strict=True)}

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        wanted = [self._lengths[tuple(prompt)] for prompt in input_ids[:, :PROMPT].tolist()]
        return input_ids.shape[1] - PROMPT >= torch.tensor(wanted, device=input_ids.device)  # [B]


def drawn_lengths(count: int, limit: int, sigma: float, seed: int) -> list[int]:
    """`count` lengths, log-normal up to `limit`, an eighth of it on average."""
    drawn = np.random.default_rng(seed).lognormal(0.0, sigma, count)
    low, high = 0.0, float(limit)
    for _ in range(60):  # bisection: the mean grows with the scale
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(drawn * scale, 1, limit).mean() < limit / 8 else (low, scale)
    return np.clip(drawn * scale, 1, limit).round().astype(int).tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "kv_memory", "--rows 2 --requests 3 --limit 16 --layers 1")
    add = parser.add_argument
    add("--rows", type=int, default=64)
    add("--requests", type=int, default=256, help="where rows are refilled")
    add("--limit", type=int, default=2048, help="most new tokens of a row")
    add("--sigma", type=float, default=1.0, help="of the log-normal lengths")
    add("--layers", type=int, default=2, help="of the model")
    options = parser.read(arguments, "rows", "requests", "limit", "layers")
    machine, device = begin(options), torch.device(options.device)
    torch.manual_seed(options.seed)
    config = Qwen2Config(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=4, head_dim=128, max_position_embeddings=2 * options.limit,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(device, torch.bfloat16).eval()
    column = 2 * options.layers * config.num_key_value_heads * 128 * torch.bfloat16.itemsize
    at_once = options.rows * (PROMPT + options.limit) * column
    findings, details = [], {}
    for name, count in (("all rows start together", options.rows), ("rows are refilled", options.requests)):
        prompts = torch.randint(512, (count, PROMPT), device=device)
        lengths = drawn_lengths(count, options.limit, options.sigma, options.seed)
        found = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=options.limit,
            pad_token_id=0, stopping_criteria=StoppingCriteriaList([EndsAt(prompts, lengths)]),
            assistant_strategy="none", return_dict_in_generate=True,
            speculative_config={"seed": options.seed, "max_batch_size": options.rows},
        )  # fmt: skip
        if found.lengths.tolist() != lengths:
            raise RuntimeError("rows did not end where they had to")
        used = found.statistics.cache_bytes
        findings.append(Finding(f"K/V when there was most of it, {name}", used / at_once, "×", "rows × limit"))
        findings.append(Finding(f"the same in MiB, of {at_once / 2**20:.0f}", used / 2**20, "MiB"))
        details[name] = sorted(lengths)
    write_result(
        options.output, "rollouts", "Memory of K/V",
        f"{options.rows} rows in flight of up to {options.limit} new tokens, an eighth of it on average (log-normal, "
        f'σ = {options.sigma:g}), {options.requests} requests where rows are refilled; strategy "none", '
        f"{options.layers} layers of 4 K/V heads of 128 in bfloat16. Bytes are counted, in pages.",
        machine, None, findings, {"options": shown(options), **details},
    )  # fmt: skip


if __name__ == "__main__":
    main()
