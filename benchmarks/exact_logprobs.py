"""What `exact_logprobs=True` costs: forward and backward pass of a micro-batch of SpecGRPOTrainer, with and without.

Answers are sampled by "none" at temperature 1; the two trainers take turns on the same tokens. Seconds are those of
the processor, medians of all turns.

    OMP_NUM_THREADS=1 python -m benchmarks.exact_logprobs --threads 1 --model SmolLM2-135M-Instruct \
        --prompts ../shared/data/gsm8k/test.jsonl
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_trl import SpecGRPOConfig, SpecGRPOTrainer
from spec_trl.cli.loading import read_prompts
from spec_trl.trainers.sampler_mismatch import SAMPLED

from .measure import Finding, Options, begin, shown, write_result
from .sampler_mismatch import KINDS
from .workload import STORIES, STORY_MODEL


WAYS = {"TRL's forward": False, "exact_logprobs": True}


def make_trainer(options: argparse.Namespace, kind: str, is_exact: bool, folder: str) -> SpecGRPOTrainer:
    """With gradient checkpointing, TRL's default."""
    config = SpecGRPOConfig(
        output_dir=folder, exact_logprobs=is_exact, assistant_strategy="none", bf16="autocast" in kind, use_cpu=True,
        report_to="none", per_device_train_batch_size=options.rows, num_generations=options.rows, seed=options.seed,
    )  # fmt: skip
    return SpecGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype=KINDS[kind]),
        lambda completions, **_: [0.0] * len(completions),
        config,
        train_dataset=Dataset.from_list([{"prompt": "?"}]),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )


def micro_batch(options: argparse.Namespace, trainer: SpecGRPOTrainer) -> dict[str, Tensor]:
    """As TRL makes it of a rollout."""
    tokenizer, model = trainer.processing_class, trainer.model
    texts = read_prompts(options.prompts)[: options.rows]
    if tokenizer.chat_template is not None:
        turns = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    chosen = [texts[row // options.group] for row in range(options.rows)]
    batch = tokenizer(chosen, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad(), trainer.accelerator.autocast():
        sampled = model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=options.new_tokens, return_dict_in_generate=True,
            assistant_strategy="none", speculative_config={"seed": options.seed},
        )  # fmt: skip
    new = sampled.logprobs.shape[1]
    mask = (torch.arange(new) < sampled.lengths[:, None]).long()  # [B, new]
    return {
        "prompt_ids": batch["input_ids"], "prompt_mask": batch["attention_mask"],
        "completion_ids": sampled.sequences[:, -new:], "completion_mask": mask,
        "advantages": torch.linspace(-1, 1, options.rows), "num_items_in_batch": mask.sum(),
        SAMPLED: sampled.logprobs * mask,
    }  # fmt: skip


def measure(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Median seconds of forward, backward and both by way, and the largest distance from the sampler."""
    seconds: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with TemporaryDirectory() as folder:
        trainers = {way: make_trainer(options, kind, is_exact, folder) for way, is_exact in WAYS.items()}
        inputs = micro_batch(options, trainers["TRL's forward"])
        for turn in range(options.turns):
            for way in list(WAYS)[:: -1 if turn % 2 else 1]:
                trainer = trainers[way]
                trainer.model.zero_grad()
                trainer.current_gradient_accumulation_steps = 1  # which TRL's training sets
                started = time.process_time()
                loss = trainer.compute_loss(trainer.model.train(), inputs)
                between = time.process_time()
                loss.backward()
                ended = time.process_time()
                seconds[way].append((between - started, ended - between, ended - started))
    name = "sampling/sampling_logp_difference/max"
    return {
        way: dict(zip(("forward", "backward", "both"), map(median, zip(*seconds[way], strict=True)), strict=True))
        | {"distance": max(trainer._metrics["train"][name])}
        for way, trainer in trainers.items()
    }


def findings_of(cells: dict[str, dict[str, Any]]) -> Sequence[Finding]:
    plain, exact = WAYS
    found: list[Finding] = []
    for kind, ways in cells.items():
        for part in ("forward", "backward", "both"):
            ratio = ways[exact][part] / ways[plain][part]
            found.append(Finding(f"{kind}: seconds of {part} with exact_logprobs", ratio, "×", plain))
        for way in WAYS:
            found.append(Finding(f"{kind}: largest distance from the sampler, {way}", ways[way]["distance"], "nats"))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    tiny = f"--model {STORY_MODEL} --prompts {STORIES} --rows 2 --new-tokens 4 --turns 1 --kinds bfloat16"
    parser = Options(__doc__, "exact_logprobs", tiny)
    add = parser.add_argument
    add("--model", required=True, help="a chat model: folder or hub id")
    add("--prompts", type=Path, required=True, help="file of questions")
    add("--rows", type=int, default=8, help="of the micro-batch")
    add("--group", type=int, default=1, help="rows that share a prompt")
    add("--new-tokens", type=int, default=128, help="of an answer at most")
    add("--turns", type=int, default=3, help="of each way")
    add("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="weights and dtype of forwards")
    options = parser.read(arguments, "rows", "group", "new_tokens", "turns")
    machine, cells = begin(options), {kind: measure(options, kind) for kind in options.kinds}
    write_result(
        options.output, "rollouts", "The cost of exact_logprobs",
        f"{Path(options.model).name}, {options.rows} rows, {options.group} to a prompt of {options.prompts.name}, "
        f"up to {options.new_tokens} tokens, T = 1, gradient checkpointing. Processor seconds, "
        f"medians of {options.turns}.",
        machine, options.turns, findings_of(cells), {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
