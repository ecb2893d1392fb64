"""How far the log-probabilities of the sampler and of TRL's training forward are apart, and what part of it padding,
positions, attention and the head hold.

Answers are sampled by "none" at temperature 1; each training forward scores the same tokens.

    python -m benchmarks.sampler_mismatch --model SmolLM2-135M-Instruct --prompts ../shared/data/gsm8k/test.jsonl
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

import spec_trl  # noqa: F401
from spec_trl.cli.loading import read_prompts

from .measure import Finding, Options, begin, shown, write_result
from .workload import STORIES, STORY_MODEL


KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float32 weights, autocast": torch.float32}


def distances(one: Tensor, other: Tensor) -> dict[str, float]:
    """In nats, of n tokens' log-probabilities each `[n]`; k3 is the mean of r - 1 - log r."""
    change = one.double() - other.double()
    k3 = (change.exp() - 1 - change).mean()
    return {"mean": change.abs().mean().item(), "largest": change.abs().max().item(), "k3": k3.item()}


def measure(options: argparse.Namespace, kind: str) -> dict[str, dict[str, float]]:
    """Distances by training forward."""
    cast: Any = nullcontext if "autocast" not in kind else lambda: torch.autocast("cpu", torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    texts = read_prompts(options.prompts)[: options.rows]
    if tokenizer.chat_template is not None:
        turns = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in turns]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)

    def load(attention: str = "sdpa", fused: bool = True, wide_head: bool = False) -> Any:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=KINDS[kind], attn_implementation=attention)
        if fused:
            add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=wide_head)
        return model

    with torch.no_grad(), cast():
        sampled = load(fused=False).generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=options.new_tokens, return_dict_in_generate=True,
            assistant_strategy="none", speculative_config={"seed": options.seed},
        )  # fmt: skip
        new = sampled.logprobs.shape[1]
        mask = torch.arange(new) < sampled.lengths[:, None]  # [B, new]
        whole = torch.cat([batch["attention_mask"], mask.long()], 1)  # [B, width]

        def score(model: Any, ids: Tensor = sampled.sequences, given: Tensor = whole, **more: Any) -> Tensor:
            """`[B, new]`"""
            labels = ids.masked_fill(given == 0, -100)
            labels[:, :-new] = -100
            out = model(input_ids=ids, attention_mask=given, labels=labels, fused_lm_head=True, **more)
            return out.log_probs[:, -new:].float()

        trl, alone = load(), torch.zeros(mask.shape)
        for row, length in enumerate(sampled.lengths.tolist()):
            end = whole.shape[1] - new + length
            start = int(whole[row].argmax())
            ids = sampled.sequences[row : row + 1, start:end]  # [1, tokens]
            labels = ids.clone()
            labels[:, :-length] = -100
            out = trl(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
            alone[row, :length] = out.log_probs[0, -length:]
        logits = load(fused=False)(input_ids=sampled.sequences, attention_mask=whole, logits_to_keep=new + 1).logits
        tokens = sampled.sequences[:, -new:, None]
        found = {
            "TRL's": score(trl),
            "with positions from the prompt's first token": score(
                trl, position_ids=(whole.cumsum(1) - 1).clamp(min=0)
            ),
            "each row alone, not padded": alone,
            "eager attention, not SDPA": score(load("eager")),
            "log-softmax of logits, not TRL's fused head": (
                logits[:, :-1].float().log_softmax(-1).gather(-1, tokens)[..., 0]
            ),
            "a float32 head in the training forward alone": score(load(wide_head=True)),
        }
    return {name: distances(scores[mask], sampled.logprobs[mask]) for name, scores in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    tiny = f"--model {STORY_MODEL} --prompts {STORIES} --rows 2 --new-tokens 4"
    parser = Options(__doc__, "sampler_mismatch", tiny)
    parser.add_argument("--model", required=True, help="a chat model: folder or hub id")
    parser.add_argument("--prompts", type=Path, required=True, help="file of questions")
    parser.add_argument("--rows", type=int, default=8, help="questions")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer at most")
    options = parser.read(arguments, "rows", "new_tokens")
    machine, cells = begin(options), {kind: measure(options, kind) for kind in KINDS}
    findings = [
        Finding(f"mean distance from the sampler, {kind}: {forward}", own["mean"], "nats")
        for kind, forwards in cells.items()
        for forward, own in forwards.items()
    ]
    write_result(
        options.output, "rollouts", "Sampler and training forward",
        f"{Path(options.model).name}, {options.rows} questions of {options.prompts.name}, up to {options.new_tokens} "
        "tokens, T = 1. Largest distances and k3 are in the result's details.",
        machine, None, findings, {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
