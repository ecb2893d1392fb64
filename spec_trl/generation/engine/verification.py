"""Verifying drafts: what the target draws at their places (exact verification, the default), or rejection sampling."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .memory import sent
from .noise import gumbel_noise, sample, token_logprobs, uniform_coins


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for the rows in flight, all on their device or all on the host.

    Args:
        tokens: `[B, γ]` int64.
        lengths: `[B]` int64, how many of them are drafts of the row; the others are padding. None: all.
        logits: `[B, γ, vocabulary]` processed draft logits; rejection verification needs them.
        scores: `[B, γ]`, perturbed logit of each token. A row's draft ends before one of -inf: the processors left no
            token there. NaN: the drafter is broken. None: nothing is known of either.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None

    def checked(self, batch: int, draft_length: int, vocabulary: int) -> "Proposal":
        """Itself; raises ValueError where tokens are not `[batch, draft_length]` int64, lengths `[batch]` int64,
        logits `[batch, draft_length, vocabulary]`, or scores `[batch, draft_length]`."""
        shape = (batch, draft_length, vocabulary)
        for name, tensor, expected in (("tokens", self.tokens, shape[:2]), ("lengths", self.lengths, shape[:1])):
            if tensor is not None and (tuple(tensor.shape) != expected or tensor.dtype != torch.int64):
                raise ValueError(
                    f"proposed {name} of shape {tuple(tensor.shape)} ({tensor.dtype}); expected {expected} of int64"
                )
        for name, floats, wanted in (("logits", self.logits, shape), ("scores", self.scores, shape[:2])):
            if floats is not None and tuple(floats.shape) != wanted:
                raise ValueError(f"proposed {name} of shape {tuple(floats.shape)}; expected {wanted}")
        return self

    def to(self, device: torch.device) -> "Proposal":
        """The same on `device`; the host does not wait for the copies."""
        parts = (self.lengths, self.logits, self.scores)
        return Proposal(sent(self.tokens, device), *(None if part is None else sent(part, device) for part in parts))

    def drafted(self) -> Tensor:
        """`[B]` int64: how many drafts each row has, none where its drafter is broken."""
        batch, most = self.tokens.shape
        lengths = self.tokens.new_full((batch,), most) if self.lengths is None else self.lengths
        if self.scores is None:
            return lengths
        sound = (self.scores > -torch.inf).long().cumprod(1).sum(1)  # [B]
        return torch.minimum(lengths, sound).masked_fill(self.scores.isnan().any(1), 0)


@dataclass(frozen=True)
class Verdict:
    """What the target made of a proposal. Drafts are accepted as far as they equal `tokens`; one more token follows.

    Args:
        tokens: `[B, γ + 1]` int64.
        scores: `[B, γ + 1]` as of :class:`~spec_trl.generation.engine.noise.Draw`; 0 where a token was not sampled.
        logprobs: `[B, γ + 1]`, likewise.
        most: `[B]` int64, drafts that may be accepted; None: as many as there are.
    """

    tokens: Tensor
    scores: Tensor
    logprobs: Tensor | None
    most: Tensor | None = None


def verify_rejection(
    logits: Tensor, proposal: Proposal, lengths: Tensor, keys: Tensor, residual_keys: Tensor, want_logprobs: bool
) -> tuple[Verdict, Tensor]:
    """Accepts a draft token with min(1, p/q) and resamples max(p - q, 0) at the first rejection.

    Leviathan et al. 2023, Algorithm 1; Chen et al. 2023; ER §2.1. The coins and the resampling noise are independent
    of the noise the drafter sampled with.

    Args:
        logits: `[B, γ + 1, vocabulary]` processed target logits p.
        proposal: the drafts, with their logits q.
        lengths: `[B]` int64, how many of them to test in each row.
        keys, residual_keys: `[B, γ + 1]` int64, of the coins and of the resampling noise.
        want_logprobs: whether to compute `logprobs`.

    Returns:
        The verdict, and `[B]` int64: how many were accepted.
    """
    assert proposal.logits is not None
    batch, drafts = torch.arange(len(logits), device=logits.device), proposal.tokens
    p = logits.softmax(dim=-1)  # [B, γ + 1, V]
    q = proposal.logits.softmax(dim=-1).to(p.dtype)  # [B, γ, V]
    p_draft = p[:, :-1].gather(2, drafts[..., None]).squeeze(2)  # [B, γ]
    q_draft = q.gather(2, drafts[..., None]).squeeze(2)  # [B, γ]
    accepted = _leading(uniform_coins(keys[:, :-1]) * q_draft < p_draft, lengths)  # [B]

    p_last = p[batch, accepted]  # [B, V]: the distribution after the last accepted draft
    residual = p_last
    if drafts.shape[1]:
        rejected = (accepted < lengths)[:, None]  # [B, 1]; else: bonus token, drawn from p itself
        q_last = q[batch, accepted.clamp(max=drafts.shape[1] - 1)]  # [B, V]
        residual = (p_last - q_last).clamp_(min=0)
        residual = torch.where(rejected & (residual.sum(-1, keepdim=True) > 0), residual, p_last)
    score, last = sample(residual.log(), gumbel_noise(residual_keys[batch, accepted], logits.shape[-1]))
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)  # [B, γ + 1]
    tokens[batch, accepted] = last
    scores = score.new_zeros(tokens.shape)  # [B, γ + 1]
    scores[batch, accepted] = score
    return Verdict(tokens, scores, token_logprobs(logits, tokens) if want_logprobs else None), accepted


def _leading(matches: Tensor, lengths: Tensor) -> Tensor:
    """Length of the leading run of `matches` (`[B, γ]` bool) within each row's `lengths` (`[B]`): `[B]` int64."""
    if not matches.shape[1]:
        return torch.zeros_like(lengths)
    within = torch.arange(matches.shape[1], device=matches.device) < lengths[:, None]  # [B, γ]
    return (matches & within).long().cumprod(dim=1).sum(dim=1)
