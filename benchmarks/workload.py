"""What is generated: prompts of unequal length, token limits, what counts as a token, and work that copies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LogitsProcessor

from spec_trl.cli.loading import read_prompts, token_ids

from .models import LoadedModel


DATA = Path(__file__).resolve().parents[1] / "examples/data"  # its README says what lies there
STORY_MODEL = DATA / "stories260K"
STORIES = DATA / "stories.json"
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 64  # tokens
LONGEST_QUESTION = 512  # tokens of a chat's first turn, which is cut there; those of GSM8K have up to 250


@dataclass(frozen=True)
class Workload:
    """One batch to generate."""

    prompts: list[list[int]]  # token ids of each row, of unequal length
    max_new_tokens: int  # per row
    temperature: float  # of the sampling; top-k, top-p and all else are off
    eos_token_ids: tuple[int, ...]  # tokens that end a row; empty: all rows get `max_new_tokens`
    pad_token_id: int  # on the left of short prompts

    def padded(self, device: torch.device) -> dict[str, Tensor]:
        """Left-padded `input_ids` and `attention_mask`, each [batch, longest] int64."""
        width = max(map(len, self.prompts))
        ids = [[self.pad_token_id] * (width - len(p)) + p for p in self.prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in self.prompts]
        return {
            "input_ids": torch.tensor(ids, device=device),  # [batch, longest]
            "attention_mask": torch.tensor(mask, device=device),  # [batch, longest]
        }

    def trimmed(self, completion: list[int]) -> list[int]:
        """`completion` up to its end of sequence, which counts, without the padding after it, which does not."""
        ends = (place + 1 for place, token in enumerate(completion) if token in self.eos_token_ids)
        return completion[: next(ends, None)]


def prompt_source(
    loaded: LoadedModel, path: Path | None, count: int, seed: int, chat: bool = False
) -> list[list[int]]:
    """`count` prompts: parts of texts, 16 to 64 tokens long; whole questions to a chat model; or as many seeded token
    ids where there is no tokenizer.

    Args:
        loaded: model and tokenizer.
        path: of texts, as of `spec-trl bench --prompts`; by default the stories in examples/data.
        count: number of prompts; texts repeat when there are fewer.
        seed: of the token ids.
        chat: each text is a user's first turn, in the tokenizer's chat template.

    Raises:
        ValueError: no file of texts, or no chat template.
    """
    # A stride through the range, so that lengths differ inside every batch, and equally in each batch of 7.
    span = LONGEST_PROMPT - SHORTEST_PROMPT
    lengths = [SHORTEST_PROMPT + round(span * ((3 * i) % 7) / 6) for i in range(count)]
    if loaded.tokenizer is None:
        vocab = loaded.model.config.vocab_size
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
    file = path or STORIES
    if not file.exists():
        raise ValueError(f"prompts: {file.name} does not exist: pass --prompts with a JSON list of strings")
    texts = read_prompts(file)
    if chat:
        if loaded.tokenizer.chat_template is None:
            raise ValueError(f"--chat: the tokenizer of {loaded.facts['model']} has no chat template: leave it out")
        turns = token_ids(texts[:count], loaded.tokenizer, LONGEST_QUESTION)
        return [turns[i % len(turns)] for i in range(count)]
    encoded = loaded.tokenizer(texts[:count])["input_ids"]
    return [encoded[i % len(encoded)][:length] for i, length in enumerate(lengths)]


def end_tokens(loaded: LoadedModel, ignore_eos: bool) -> tuple[int, ...]:
    """The model's end-of-sequence ids; with `ignore_eos` they are also taken from its generation config."""
    config = loaded.model.generation_config
    if ignore_eos:
        config.eos_token_id = None
    ids = config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Tokens that `a` and `b` share from the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


# ---- completions that repeat their prompt -------------------------------------------------------------------------


class Copying(LogitsProcessor):
    """Where the last `context` tokens (at least 2) stood in the row before, but for one of them, the token that
    followed them there has `probability` at temperature 1: a token in another's place does not end the copying, as in
    an edit. Ordinary text, of which next to none should agree, goes on as it would."""

    prefix_only = True

    def __init__(self, context: int, probability: float) -> None:
        self._context = context
        self._odds = math.log(probability / (1 - probability))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` of the token after `input_ids` `[B, n]` int64."""
        if input_ids.shape[1] <= self._context:
            return scores
        windows = input_ids.unfold(1, self._context, 1)  # [B, n - context + 1, context]
        agreeing = (windows[:, :-1] == windows[:, -1:]).sum(-1)  # [B, n - context]
        same = agreeing >= self._context - 1  # [B, n - context]
        places = torch.arange(same.shape[1], device=same.device).where(same, -1).amax(1)  # [B], the newest
        followers = input_ids.gather(1, (places.clamp(min=0) + self._context)[:, None])  # [B, 1]
        raised = scores.logsumexp(1, keepdim=True) + self._odds  # [B, 1]
        raised = raised.where(places[:, None] >= 0, scores.gather(1, followers))
        return scores.scatter(1, followers, raised)


def copy_heavy(prompt: Sequence[int], passage: int, begun: int) -> list[int]:
    """A prompt that has its first `passage` tokens twice and begins with them again; its first one, which begins all
    texts, once."""
    first, rest = list(prompt[:1]), list(prompt[1:passage])
    return first + rest + rest + rest[:begun]
