"""Drafts by prompt lookup: tokens that followed the same n-gram earlier in the row's text."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.drafter import Drafter
from ..engine.sampling.accept import Proposal
from ..engine.sampling.noise import RoundNoise
from ..options import SpeculativeConfig
from ..registry import register_drafter


@register_drafter
class NgramDrafter(Drafter):
    """Proposes the tokens after the most recent earlier occurrence of a row's last n tokens, longest n first, at most
    `ngram_size`."""

    strategy = "ngram"
    has_probabilities = False
    looks_up = True

    def __init__(self, ngram_size: int) -> None:
        self._ngram_size = ngram_size

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "NgramDrafter":
        return cls(config.ngram_size)

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        text = rows.tokens[: rows.active, : rows.longest]  # [B, columns]
        lengths = rows.lengths  # [B]
        columns = torch.arange(text.shape[1], device=text.device)  # [columns]
        # Grow the match backwards: after n steps `matches[b, c]` means that the n tokens up to column c equal the
        # row's last n. A match must end before the last column, so that a token follows.
        matches = columns < lengths[:, None] - 1  # [B, columns]
        start = torch.zeros_like(lengths)  # [B], first column of the continuation; 0: nothing found
        for n in range(min(self._ngram_size, text.shape[1])):
            last = text.gather(1, (lengths - 1 - n).clamp(min=0)[:, None])  # [B, 1], n-th token from the end
            same = torch.zeros_like(matches)
            same[:, n:] = text[:, : text.shape[1] - n] == last
            matches = matches & same & (n < lengths[:, None])
            newest = (matches * (columns + 1)).amax(dim=1)  # [B]
            start = torch.where(newest > 0, newest, start)
        continuation = start[:, None] + torch.arange(draft_length, device=text.device)  # [B, γ]
        tokens = text.gather(1, continuation.clamp(max=text.shape[1] - 1))  # [B, γ]
        drafted = torch.where(start > 0, (lengths - start).clamp(max=draft_length), 0)  # [B]
        return Proposal(tokens, drafted)
