"""Accepting drafts: exact verification (the default) and rejection sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .noise import Draw, gumbel_noise, sample, token_logprobs, uniform_coins


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for the rows in flight.

    Args:
        tokens: `[B, γ]` int64.
        lengths: `[B]` int64, how many of them are drafts of the row; the others are padding.
        logits: `[B, γ, vocabulary]` processed draft logits; rejection verification needs them.
        broken: bool scalar, whether the drafter found NaN in its logits; read when the round waits for the device
            anyway.
    """

    tokens: Tensor
    lengths: Tensor
    logits: Tensor | None = None
    broken: Tensor | None = None

    def checked(self, batch: int, draft_length: int, vocabulary: int) -> "Proposal":
        """Itself; raises ValueError where tokens are not `[batch, draft_length]` int64, lengths `[batch]` int64, or
        logits `[batch, draft_length, vocabulary]`."""
        shape = (batch, draft_length, vocabulary)
        for name, tensor, expected in (("tokens", self.tokens, shape[:2]), ("lengths", self.lengths, shape[:1])):
            if tuple(tensor.shape) != expected or tensor.dtype != torch.int64:
                raise ValueError(
                    f"proposed {name} of shape {tuple(tensor.shape)} ({tensor.dtype}); expected {expected} of int64"
                )
        if self.logits is not None and tuple(self.logits.shape) != shape:
            raise ValueError(f"proposed logits of shape {tuple(self.logits.shape)}; expected {shape}")
        return self


@dataclass(frozen=True)
class Verdict:
    """What the target made of a proposal: `tokens` `[B, γ + 1]` int64, of which a row's next are the first `accepted +
    1` (`[B]` int64); `scores` and `logprobs` `[B, γ + 1]` as of :class:`~spec_trl.generation.engine.noise.Draw`, the
    scores 0 where a token was not sampled."""

    tokens: Tensor
    accepted: Tensor
    scores: Tensor
    logprobs: Tensor | None


@dataclass(frozen=True)
class Outcome:
    """What a round came to. In most rounds each row has one chain of draft tokens or none; the n-th chains of all rows
    are lane n.

    Args:
        verdict: on the chain that each row goes on with.
        winner: `[B]` int64, that chain's lane.
        width: largest number of draft tokens verified in any row.
        by_drafter: what each drafter proposed, by its number.
        owners: N lists of B numbers, the drafter of each row's chain in each lane; -1: the row has none there.
        drafters: `[N, B]` int64, the same on the device.
        drafted: N tensors `[B]` int64, draft tokens of each chain; 0 where the row has none.
        accepted: N tensors `[B]` int64, how many of them were accepted.
    """

    verdict: Verdict
    winner: Tensor
    width: int
    by_drafter: Mapping[int, Proposal]
    owners: Sequence[Sequence[int]]
    drafters: Tensor
    drafted: Sequence[Tensor]
    accepted: Sequence[Tensor]

    @classmethod
    def of_one_chain(cls, which: int | None, proposal: Proposal, verdict: Verdict) -> "Outcome":
        """The outcome where drafter `which` alone drafted, for all rows; None: nobody did."""
        lengths = proposal.lengths
        if which is None:
            return cls(verdict, lengths, 0, {}, [], lengths[:0], [], [])
        return cls(
            verdict, torch.zeros_like(lengths), proposal.tokens.shape[1], {which: proposal},
            [[which] * len(lengths)], torch.full_like(lengths, which)[None], [lengths], [verdict.accepted],
        )  # fmt: skip

    def of_each_drafter(self, values: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """`values` of each lane and row, sorted by drafter: B values each, -1 where the row has no chain of it."""
        found = {which: [-1] * len(self.verdict.accepted) for which in self.by_drafter}
        for own, of_lane in zip(self.owners, values, strict=True):
            for row, which in enumerate(own):
                if which >= 0:
                    found[which][row] = of_lane[row]
        return found


def verify_exact(draw: Draw, proposal: Proposal) -> Verdict:
    """Accepts the drafts that equal the target's own tokens, drawn at all γ + 1 positions (design §3).

    The target's token at a position does not depend on the draft, so the output is what `"none"` gives:

        fed            x_t   d1   d2   d3        (x_t: last committed token)
        target token    y1   y2   y3   y4        accept d1 = y1, d2 = y2, ... up to the first difference;
        output          y1   y2   y3   y4        the y after the last accepted draft is corrected or bonus
    """
    accepted = _leading(proposal.tokens == draw.tokens[:, :-1], proposal.lengths)  # [B]
    return Verdict(draw.tokens, accepted, draw.scores, draw.logprobs)


def verify_rejection(
    logits: Tensor, proposal: Proposal, keys: Tensor, residual_keys: Tensor, want_logprobs: bool
) -> Verdict:
    """Accepts a draft token with min(1, p/q) and resamples max(p - q, 0) at the first rejection.

    Leviathan et al. 2023, Algorithm 1; Chen et al. 2023; ER §2.1. The coins and the resampling noise are independent
    of the noise the drafter sampled with.

    Args:
        logits: `[B, γ + 1, vocabulary]` processed target logits p.
        proposal: the drafts, with their logits q.
        keys, residual_keys: `[B, γ + 1]` int64, of the coins and of the resampling noise.
        want_logprobs: whether to compute `logprobs`.
    """
    assert proposal.logits is not None
    batch, drafts, lengths = torch.arange(len(logits), device=logits.device), proposal.tokens, proposal.lengths
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
    return Verdict(tokens, accepted, scores, token_logprobs(logits, tokens) if want_logprobs else None)


def _leading(matches: Tensor, lengths: Tensor) -> Tensor:
    """Length of the leading run of `matches` (`[B, γ]` bool) within each row's `lengths` (`[B]`): `[B]` int64."""
    if not matches.shape[1]:
        return torch.zeros_like(lengths)
    within = torch.arange(matches.shape[1], device=matches.device) < lengths[:, None]  # [B, γ]
    return (matches & within).long().cumprod(dim=1).sum(dim=1)
