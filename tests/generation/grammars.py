"""Grammars of outputs that know no other text, nor how one goes on after its end, as users pass them to `generate`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria


WIDTH = 14  # of padded prompts
EOS = 7
KINDS = ("function", "raising function", "processor")


class Refused(Exception):
    """A prefix that is no text of the grammar."""


class Processor(LogitsProcessor):
    """A function as a processor."""

    prefix_only = True

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.function(input_ids, scores)


def follow(row: int, output: list[int]) -> list[int]:
    """What may follow `output` in row `row`; nothing where it is no text of the grammar, or has ended."""

    def allowed(last: int) -> list[int]:
        return [EOS, *(8 + (last + row + step) % 20 for step in (1, 2, 3))]

    text = [0, *output]
    is_text = all(token in allowed(before) for before, token in zip(text, output, strict=False))
    return allowed(text[-1]) if is_text and EOS not in output else []


class Trie:
    """A `prefix_allowed_tokens_fn`: `[]` for prefixes that it does not know, of which transformers makes an error.

    Args:
        rows: whose grammar each row of the batch has.
        raises: an error of its own instead.
        lenient: rows that have ended, which `generate` goes on to show, may go on with padding.
    """

    def __init__(self, rows: Sequence[int], raises: bool, lenient: bool) -> None:
        self.rows, self.raises, self.lenient = rows, raises, lenient
        self.shown: list[tuple[int, list[int]]] = []

    def __call__(self, row: int, prefix: Tensor) -> list[int]:
        output = prefix[WIDTH:].tolist()
        self.shown.append((self.rows[row], output))
        if self.lenient and {EOS, 0} & set(output):
            return [0]
        found = follow(self.rows[row], output)
        if self.raises and not found:
            raise Refused(output)
        return found

    def check(self) -> None:
        """It was shown nothing after a token that it forbids, or after an end."""
        assert all(not output or output[-1] in follow(row, output[:-1]) for row, output in self.shown)


def grammar(kind: str, rows: Sequence[int] = range(99), lenient: bool = False) -> tuple[Trie, dict[str, Any]]:
    """One of `KINDS`, and the option that passes it; a processor has the grammar of its first row for all."""
    trie = Trie(rows, kind != "function", lenient)
    if kind != "processor":
        return trie, dict(prefix_allowed_tokens_fn=trie)
    trie.rows = [0] * len(rows)

    def act(input_ids: Tensor, scores: Tensor) -> Tensor:
        only = torch.full_like(scores, -torch.inf)
        for row, prefix in enumerate(input_ids):
            only[row, trie(row, prefix)] = 0
        return scores + only

    return trie, dict(logits_processor=LogitsProcessorList([Processor(act)]))


class EndsOnce(StoppingCriteria):
    """Ends a row at a token from 58 on, and unless `lenient` knows no text that goes on after one."""

    prefix_only = True

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if not self.lenient and (input_ids[:, WIDTH:-1] >= 58).any():
            raise Refused
        return input_ids[:, -1] >= 58
