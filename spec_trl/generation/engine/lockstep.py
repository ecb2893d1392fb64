"""Decodes in step, for processors and criteria that may read the whole batch or have state.

`generate`'s calls are repeated in order and once: every step sees the whole batch up to there. Drafts are made without
these processors, and verified by one forward for all rows. Then the round walks along the drafts, step by step, as far
as every row draws its own:

    row 1 drafts   a b c d     the target draws   a b c .
    row 2 drafts   e f g h                        e f x .     both rows commit three tokens, and the round ends
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..planner.control import Chain
from .kv.memory import sent
from .rollout import Rollout
from .rows import Admission
from .sampling.accept import Drafts, Outcome, Proposal, leading
from .sampling.noise import Draw, RoundNoise


class RolloutInStep(Rollout):
    """A rollout with all requests at once and equally many generated tokens in all rows, as in `generate`.

    Ended rows stay until the last row ends, so that processors and criteria get all rows at every step: with
    `padding`, or if None with tokens of the model, as in `generate` without EOS. The options are those of
    :class:`Rollout`, with rows for all requests.
    """

    in_step = True

    def __init__(self, *options: Any, padding: int | None, on_tokens: Any = None, **more: Any) -> None:
        super().__init__(*options, **more)
        self._padding, self._stream = padding, on_tokens
        self._ended = np.zeros(self.rows.capacity, np.bool_)  # [B]

    def _requests(self) -> list[int]:
        return np.where(self._ended, -1, self.rows.indices).tolist()

    def _plan(self) -> list[Chain]:
        return [replace(chain, rows=None) for chain in super()._plan()[:1]]  # one chain, of all rows

    def _arrange(self, lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> Drafts:
        drafts = super()._arrange(lengths, drafted)
        if not drafts.width or not self._ended.any():
            return drafts
        owners = np.where(self._ended, -1, drafts.owners)  # [B]
        tokens = drafts.proposal.tokens.masked_fill(self._padded()[:, None], self._padding or 0)  # [B, γ]
        drafters, proposal = sent(torch.from_numpy(owners), tokens.device), replace(drafts.proposal, tokens=tokens)
        return replace(drafts, owners=owners.tolist(), drafters=drafters, proposal=proposal)

    def _padded(self) -> Tensor:
        """`[B]` bool, on the device: rows that go on with padding."""
        return sent(torch.from_numpy(self._ended & (self._padding is not None)), self.rows.tokens.device)

    def _first_tokens(self, admission: Admission, logits: Tensor) -> Outcome:
        rows = self.rows
        logits = logits[[*admission.first_token_rows.values()]]  # [B, 1, V], of the rows' leaders
        noise = RoundNoise(rows.noise_keys(1), logits.shape[-1]) if self._do_sample else None
        return self._judge(super()._arrange({}, {}), logits, noise)

    def _judge(self, drafts: Drafts, logits: Tensor, noise: RoundNoise | None) -> Outcome:
        """Walks along the drafts. A step is one of `generate`: processors, token, criteria, streamer. The next step
        follows if every row has drafted its drawn token, and no row has ended."""
        rows, proposal = self.rows, drafts.proposal
        padded, ended = self._padded(), sent(torch.from_numpy(self._ended), logits.device)  # [B] each
        lengths = proposal.drafted().masked_fill(padded, drafts.width)  # [B]
        draws, agrees, ends = list[Draw](), list[Tensor](), torch.zeros_like(ended)
        for step in range(drafts.width + 1):
            drawn = self._pipeline.draw(logits[:, step : step + 1], noise, step, self.want_logprobs)
            drawn = replace(drawn, tokens=drawn.tokens.masked_fill(padded[:, None], self._padding or 0))
            draws.append(drawn)
            if not ((drawn.scores[:, 0] > -torch.inf) | ended).all():
                break  # no text: the commit raises
            rows.write(step, drawn.tokens)
            ends = self._stopping.in_step(step + 1) & ~ended
            if self._stream is not None:
                self._stream(drawn.tokens[0])
            if step < drafts.width:
                agrees.append((proposal.tokens[:, step] == drawn.tokens[:, 0]) & (step < lengths))
            if step == drafts.width or ends.any() or not agrees[step].all():
                break
        return self._outcome(drafts, draws, agrees, ends)

    def _outcome(self, drafts: Drafts, draws: list[Draw], agrees: list[Tensor], ends: Tensor) -> Outcome:
        """The outcome of a walk: draws by step, rows (`[B]` bool) that had drafted the drawn token, and rows that end
        with the last one. Only drafts that the walk has reached count."""
        proposal, steps, batch = drafts.proposal, len(draws), len(ends)
        logprobs = [drawn.logprobs for drawn in draws if drawn.logprobs is not None]
        kept = [drawn.kept for drawn in draws if drawn.kept is not None]
        drawn = Draw(
            torch.cat([drawn.tokens for drawn in draws], dim=1),
            torch.cat([drawn.scores for drawn in draws], dim=1),
            torch.cat(logprobs, dim=1) if logprobs else None,
            kept=torch.cat(kept, dim=1) if kept else None,
        )
        drafted = np.where(self._ended, 0, proposal.drafted().cpu().numpy().clip(max=steps))  # [B]
        right = torch.stack(agrees, dim=1).cpu().numpy() if agrees else np.zeros((batch, 0), np.bool_)  # [B, n]
        is_broken = proposal.scores is not None and bool(proposal.scores.isnan().any())
        return Outcome(
            drawn,
            tokens=drawn.tokens.cpu().numpy(),
            counts=np.full(batch, steps),
            sound=np.where(self._ended, steps, leading(drawn.scores.cpu().numpy() > -np.inf)),
            width=drafts.width,
            owners=drafts.owners,
            drafted=drafted,
            accepted=np.minimum(leading(right), drafted),
            broken={*drafts.owners} - {-1} if is_broken else set(),
            ends=ends.cpu().numpy(),
        )

    def _commit(self, outcome: Outcome) -> tuple[list[int], int]:
        finished, tokens = super()._commit(outcome)
        self._ended[finished] = True
        return finished, tokens

    def _retire(self, finished: list[int]) -> None:
        if finished:
            self._complete(finished)
        if self._ended.all():
            self._free(list(range(self.rows.active)))
