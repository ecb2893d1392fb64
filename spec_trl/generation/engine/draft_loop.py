"""Drafting token by token: draw, write, go on. A network's loop runs step by step, or is captured whole."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .accept import Proposal
from .filters import Filters
from .noise import Draw, RoundNoise


Drawing = Callable[[Tensor, RoundNoise | None, int, Draw | None], tuple[Draw, Tensor | None]]
"""As :meth:`~spec_trl.generation.engine.drafter.DraftSession.draw`."""

Forward = Callable[[Tensor, Tensor, int], Tensor]
"""Takes tokens and columns `[B, q]` and the step of a draft, and returns logits `[B, q, V]`."""


@dataclass(frozen=True)
class NetworkDraft:
    """One round's loop of a network, which is fed every token that was drawn.

    Args:
        tokens: `[B, known + γ]` int64, the newest committed tokens, which are fed first, and places for the drafts.
        columns: `[B, known + γ - 1]` int64, where they lie in the cache; nobody feeds the last draft.
        known: how many committed tokens there are, at least 1.
        noise: of the round; None: greedy.
        draw: of the session.
        show: called with the step and its tokens `[B, 1]`, for processors that look at the text.
        drawn_by: all that a draw depends on besides logits and noise, where these are numbers, and no text has to be
            shown nor logits returned: such loops can be captured. None: it is more than that.
    """

    tokens: Tensor
    columns: Tensor
    known: int
    noise: RoundNoise | None
    draw: Drawing
    show: Callable[[int, Tensor], None]
    drawn_by: Filters | None

    @property
    def draft_length(self) -> int:
        """γ."""
        return self.tokens.shape[1] - self.known

    def run(self, forward: Forward) -> Proposal:
        """Drafts: draws one token of every row from each forward, and writes it before the next one reads it."""
        tokens, scores, processed, drawn = [], [], [], None
        for step in range(self.draft_length):
            end = self.known + step
            fed = slice(end - 1 if step else 0, end)
            logits = forward(self.tokens[:, fed], self.columns[:, fed], step)[:, -1:]  # [B, 1, V]
            drawn, shown = self.draw(logits, self.noise, step, drawn)
            self.tokens[:, self.known + step, None] = drawn.tokens
            if self.drawn_by is None:
                self.show(step, drawn.tokens)
            tokens.append(drawn.tokens)
            scores.append(drawn.scores)
            if shown is not None:
                processed.append(shown)
        draft_logits = torch.cat(processed, dim=1) if processed else None  # [B, γ, V]
        return Proposal(torch.cat(tokens, dim=1), None, draft_logits, torch.cat(scores, dim=1))
