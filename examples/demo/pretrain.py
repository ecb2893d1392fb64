"""Makes the demo's policy: plain next-token training on sums, half of them worked out and half of them guessed.

``python -m examples.demo.pretrain`` writes the weights that are shipped in ``examples/demo/policy``. The habit of
guessing is put in on purpose: it leaves GRPO something to unlearn.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo.task import (
    MAX_COMPLETION_LENGTH,
    build_dataset,
    build_tokenizer,
    draw_terms,
    exact_match,
    write_prompt,
    write_working,
)


POLICY = Path(__file__).parent / "policy"


@dataclass(frozen=True)
class Lesson:
    """Some steps of 64 solved sums: peak learning rate, how long the sums are, and the habits of `write_working`."""

    steps: int
    learning_rate: float
    mean_extra_terms: float
    habits: dict[str, float]


# To add, on long sums that are written out; then to guess half of the time. The shipped weights went through these
# lessons in three runs, each from the bfloat16 weights of the one before.
LESSONS = (
    Lesson(1800, 3e-3, 6.0, {"bold": 0.4, "slip": 0.08, "bold_slip": 0.24}),
    Lesson(300, 1e-3, 6.0, {"bold": 0.5, "slip": 0.02, "bold_slip": 0.4}),
    Lesson(500, 1.5e-3, 3.0, {"guess": 0.5, "slip": 0.01}),
)


def build_policy(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A 0.8 M parameter Llama; every projection's input is a multiple of 128, so 4-bit groups of 128 fit."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48,  # 43 characters and special tokens, rounded up for 4-bit kernels
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def draw_batches(
    tokenizer: PreTrainedTokenizerFast, size: int, rng: random.Random, lesson: Lesson
) -> list[dict[str, torch.Tensor]]:
    """Draws 8 batches of `size` solved sums, sorted by prompt length so that little is padding.

    Returns:
        Dicts of input_ids, attention_mask and labels, each [size, longest] int64; labels are -100 where nothing is
        to be learnt: on the prompt and on padding.
    """
    rows: list[tuple[list[int], int]] = []
    for _ in range(8 * size):
        terms = draw_terms(rng, lesson.mean_extra_terms)
        prompt, working = write_prompt(terms), write_working(terms, rng, **lesson.habits)
        rows.append(([*tokenizer(prompt + working).input_ids, tokenizer.eos_token_id], 1 + len(prompt)))
    rows.sort(key=lambda row: row[1])  # guesses stay among workings: a batch's loss is a mean over its tokens
    batches = []
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        longest = max(len(tokens) for tokens, _ in chunk)
        ids = torch.full((size, longest), tokenizer.pad_token_id)  # [B, T]
        labels = torch.full((size, longest), -100)  # [B, T]
        for b, (tokens, prompt_length) in enumerate(chunk):
            ids[b, : len(tokens)] = torch.tensor(tokens)
            labels[b, prompt_length : len(tokens)] = ids[b, prompt_length : len(tokens)]
        # Right padding: causal attention never sees it, the mask only keeps the model from warning.
        batches.append({"input_ids": ids, "attention_mask": (ids != tokenizer.pad_token_id).long(), "labels": labels})
    rng.shuffle(batches)
    return batches


def train(policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, lesson: Lesson, seed: int) -> None:
    """Trains `policy` in place on one lesson."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, max_lr=lesson.learning_rate, total_steps=lesson.steps, pct_start=0.1)
    batches: list[dict[str, torch.Tensor]] = []
    progress = trange(lesson.steps, desc="pre-training", mininterval=1)
    for _ in progress:
        batches = batches or draw_batches(tokenizer, 64, rng, lesson)
        loss = policy(**batches.pop()).loss  # scalar
        loss.backward()
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{loss.item():.3f}")


@torch.no_grad()
def accuracy(policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> float:
    """Share of 256 fresh questions that `policy` answers right when sampled at temperature 1."""
    questions = build_dataset(256, seed)
    inputs = tokenizer(questions["prompt"][:], padding=True, return_tensors="pt")
    policy.eval()
    sequences = policy.generate(
        **inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_COMPLETION_LENGTH
    )  # [256, prompt + new]
    completions = tokenizer.batch_decode(sequences[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(exact_match(completions, questions["answer"][:])) / len(completions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=POLICY, help="folder to write (default: %(default)s)")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer)
    for number, lesson in enumerate(LESSONS):
        train(policy, tokenizer, lesson, seed=arguments.seed + number)
    policy.to(torch.bfloat16).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"{policy.num_parameters():,} parameters in {arguments.output}")
    print(f"exact match at temperature 1: {accuracy(policy.float(), tokenizer, seed=arguments.seed + 100):.3f}")


if __name__ == "__main__":
    main()
