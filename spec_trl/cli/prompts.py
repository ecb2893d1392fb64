"""Prompts: built-in ones, those of a file, and random tokens for a model without a tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


PROMPTS = [
    "Explain in one paragraph why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 2.5 hours. What is its average speed? Reason step by step.",
    "Translate to French: The early bird catches the worm.",
    "Once upon a time, a little girl found a key in the garden.",
    "List five countries of Africa with their capitals, one per line.",
    "A shop sells pens at 3 for 2 euros. How much do 21 pens cost? Reason step by step.",
    "Summarise: the meeting was moved from Monday to Thursday because the room is being painted.",
]
_FIELDS = ("prompt", "question", "text")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: .txt (one per line), .jsonl (with "prompt", "question" or "text"), or .json (a list of
    strings).

    Raises:
        ValueError: there are none, or the file is something else.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip()]
        prompts = json.loads(text) if path.suffix == ".json" else lines
        if path.suffix == ".jsonl":
            prompts = [_prompt_of(json.loads(line), number) for number, line in enumerate(lines, start=1)]
    except ValueError as error:
        raise ValueError(f"prompts file {path}: {error}") from None
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts file {path} holds no prompts; give one per line, or a JSON list of strings.")
    return prompts


def _prompt_of(row: Any, number: int) -> Any:
    for name in _FIELDS if isinstance(row, dict) else ():
        if name in row:
            return row[name]
    found = sorted(row) if isinstance(row, dict) else type(row).__name__
    raise ValueError(f"entry {number} has {found}; it needs 'prompt', 'question' or 'text'.")


def token_ids(prompts: list[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> list[list[int]]:
    """The tokens of each prompt, cut after `longest`; as a chat where there is a template, which is not cut."""
    cut = [tokenizer.decode(tokenizer(p, add_special_tokens=False).input_ids[:longest]) for p in prompts]
    if tokenizer.chat_template is None:
        return [tokenizer(prompt).input_ids for prompt in cut]
    turns = [[{"role": "user", "content": prompt}] for prompt in cut]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]  # the template has put them


def random_ids(rows: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """`rows` prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, length), generator=generator).tolist()


def pad_left(prompts: list[list[int]], device: torch.device) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, each `[B, width]` int64."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)  # [B, width]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)  # [B, width]
    return {"input_ids": ids, "attention_mask": mask}
