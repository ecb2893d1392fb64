"""Drafting token by token: draw, write, go on. A network's loop runs step by step, or is captured whole."""

from collections.abc import Callable, Iterable, Iterator
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


def draft_loop(
    logits: Iterable[Tensor], noise: RoundNoise | None, draw: Drawing, write: Callable[[int, Tensor], None]
) -> Proposal:
    """Draws one token of every row from each of `logits` `[B, 1, V]`, γ of them, and gives it to `write`, with its
    step, before it asks for the next. `noise`: of the round; None: greedy."""
    tokens, kept, scores, drawn = [], [], [], None
    for step, present in enumerate(logits):
        drawn, processed = draw(present, noise, step, drawn)
        write(step, drawn.tokens)
        tokens.append(drawn.tokens)
        scores.append(drawn.scores)
        if processed is not None:
            kept.append(processed)
    draft_logits = torch.cat(kept, dim=1) if kept else None  # [B, γ, V]
    return Proposal(torch.cat(tokens, dim=1), None, draft_logits, torch.cat(scores, dim=1))


@dataclass(frozen=True)
class NetworkDraft:
    """One round's loop of a network, which is fed each token that was drawn.

    Args:
        tokens: `[B, known + γ]` int64, the newest committed tokens, which are fed first, and room for the drafts.
        columns: `[B, known + γ - 1]` int64, where they lie in the cache; nobody feeds the last draft.
        known: how many committed tokens there are, at least 1.
        noise: of the round; None: greedy.
        draw: of the session.
        show: is given each step and its tokens `[B, 1]`, for processors that look at the text.
        drawn_by: all that a draw depends on besides logits and noise, where these are numbers, and nothing has to be
            shown or kept: such loops can be captured. None: it is more than that.
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
        """Drafts."""
        return draft_loop(self._logits(forward), self.noise, self.draw, self._write)

    def _logits(self, forward: Forward) -> Iterator[Tensor]:
        for step in range(self.draft_length):
            end = self.known + step
            fed = slice(end - 1 if step else 0, end)
            yield forward(self.tokens[:, fed], self.columns[:, fed], step)[:, -1:]

    def _write(self, step: int, tokens: Tensor) -> None:
        self.tokens[:, self.known + step, None] = tokens
        if self.drawn_by is None:
            self.show(step, tokens)
