"""Loads a device, a model and prompts named on a command line."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..value_checks import require_folder_or_id


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


def find_device(name: str | None) -> torch.device:
    """Returns the device called `name`; None: CUDA if present, else the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    try:
        return torch.empty(0, device=name or ("cuda" if torch.cuda.is_available() else "cpu")).device
    except (AssertionError, RuntimeError) as error:  # a build without CUDA asserts
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error


def load_config(name: str) -> PreTrainedConfig:
    """Loads the config of the causal LM of a folder or hub id.

    Raises:
        ValueError: there is no config, or it is of another kind of model.
    """
    require_folder_or_id("MODEL", name)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"MODEL {name} has no config that transformers can read: {reason}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"MODEL {name} is of type {config.model_type!r}, which transformers has no causal LM for.")
    return config


def load_model(name: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """Loads the causal LM of a folder or hub id for inference; `dtype` as in transformers, "auto" included.

    Raises:
        ValueError: its weights are missing or damaged.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each format has errors of its own
        raise ValueError(f"MODEL {name} cannot be loaded: {type(error).__name__}: {error}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer of a folder or hub id; None if there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: .txt (one per line), .jsonl (with "prompt", "question" or "text"), or .json (a list of
    strings).

    Raises:
        ValueError: the file has no prompts, or another format.
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
    """Tokenizes prompts, cut after `longest` tokens; with a chat template as uncut chats."""
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
