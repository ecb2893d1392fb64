"""Accepting drafts: as far as they equal what the target draws in their place (exact verification, the default), or
by rejection sampling. One read of the device per round tells the host how far each row gets."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .memory import sent
from .noise import gumbel_noise, sample, token_logprobs, uniform_coins


Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


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
    accepted = _leading_within(uniform_coins(keys[:, :-1]) * q_draft < p_draft, lengths)  # [B]

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


def _leading_within(matches: Tensor, lengths: Tensor) -> Tensor:
    """Length of the leading run of `matches` (`[B, γ]` bool) within each row's `lengths` (`[B]`): `[B]` int64."""
    if not matches.shape[1]:
        return torch.zeros_like(lengths)
    within = torch.arange(matches.shape[1], device=matches.device) < lengths[:, None]  # [B, γ]
    return (matches & within).long().cumprod(dim=1).sum(dim=1)


@dataclass(frozen=True)
class Judged:
    """How a lane's proposal fared: target `tokens` `[B, γ + 1]`, of which a row's next are the first `accepted + 1`,
    and whether each is `sound`: neither from NaN nor without any probability; how many tokens were `drafted` and
    `accepted` (`[B]` each), and the rows whose drafter drew from NaN (`is_broken`, `[B]`)."""

    tokens: Integers
    sound: Bools
    drafted: Integers
    accepted: Integers
    is_broken: Bools


def judge(lanes: Sequence[tuple[Proposal, Verdict]], room: Integers) -> list[Judged]:
    """Accepts the drafts that equal the target's own tokens (design §3), for rows with `room` (`[B]`) tokens left.

    The target's token at a position does not depend on the draft, so the output is what `"none"` gives:

        fed            x_t   d1   d2   d3        (x_t: last committed token)
        target token    y1   y2   y3   y4        accept d1 = y1, d2 = y2, ... up to the first difference;
        output          y1   y2   y3   y4        the y after the last accepted draft is corrected or bonus
    """
    parts = [_told(*lane) for lane in lanes]
    # The round waits for the device here, and nowhere else. float64 holds any token, and any score.
    told = torch.cat(list(itertools.chain(*parts)), dim=1).cpu().numpy()  # [B, all parts]
    judged, at = [], 0
    for own in parts:
        ends = [at, *(at := at + part.shape[1] for part in own)]
        judged.append(_judge(room, *(told[:, start:end] for start, end in itertools.pairwise(ends))))
    return judged


def _told(proposal: Proposal, verdict: Verdict) -> list[Tensor]:
    """What the host is told of a lane: `[B, n]` each, n = 0 where there is nothing to tell."""
    nothing = verdict.tokens[:, :0]
    return [
        verdict.tokens, verdict.scores.double(), proposal.tokens,
        nothing if proposal.scores is None else proposal.scores.double(),
        *(nothing if part is None else part[:, None] for part in (proposal.lengths, verdict.most)),
    ]  # fmt: skip


def _judge(
    room: Integers,
    tokens: Floats,
    scores: Floats,
    drafts: Floats,
    draft_scores: Floats,
    lengths: Floats,
    most: Floats,
) -> Judged:
    drafted = np.minimum(room - 1, drafts.shape[1])  # [B], the token after the drafts needs room too
    if lengths.shape[1]:
        drafted = np.minimum(drafted, lengths[:, 0].astype(np.int64)).clip(min=0)
    is_broken = np.logical_or.reduce(np.isnan(draft_scores), axis=1)  # [B]
    if draft_scores.shape[1]:
        drafted = np.where(is_broken, 0, np.minimum(drafted, _leading(draft_scores > -np.inf)))
    accepted = np.minimum(drafted, _leading(drafts == tokens[:, :-1]))  # [B]
    if most.shape[1]:
        accepted = np.minimum(accepted, most[:, 0].astype(np.int64))
    return Judged(tokens.astype(np.int64), scores > -np.inf, drafted, accepted, is_broken)


def _leading(holds: Bools) -> Integers:
    """`[B]`: for how many of its first places each row of `holds` `[B, n]` holds."""
    return np.logical_and.accumulate(holds, axis=1).sum(1)


@dataclass(frozen=True)
class Outcome:
    """What a round came to. In most rounds each row has one chain of draft tokens or none; the n-th chains of all rows
    are lane n.

    Args:
        verdict: on the chain that each row goes on with, on the device.
        tokens, sound: of the same, as of :class:`Judged`.
        winner: `[B]`, that chain's lane.
        width: largest number of draft tokens verified in any row.
        owners: N lists of B numbers, the drafter of each row's chain in each lane; -1: the row has none there.
        drafted: `[N, B]` draft tokens of each chain; 0 where the row has none.
        accepted: `[N, B]`, how many of them were accepted; -1: the row takes no token at all.
        broken: drafters that drew from NaN.
    """

    verdict: Verdict
    tokens: Integers
    sound: Bools
    winner: Integers
    width: int
    owners: Sequence[Sequence[int]]
    drafted: Integers
    accepted: Integers
    broken: set[int]

    @classmethod
    def of_one_chain(cls, which: int | None, proposal: Proposal, verdict: Verdict, room: Integers) -> "Outcome":
        """The outcome where drafter `which` alone drafted, for all rows; None: nobody did."""
        (own,) = judge([(proposal, verdict)], room)
        batch = len(room)
        return cls(
            verdict, own.tokens, own.sound, np.zeros(batch, np.int64), proposal.tokens.shape[1],
            [] if which is None else [[which] * batch], own.drafted[None], own.accepted[None],
            {which} if which is not None and own.is_broken.any() else set(),
        )  # fmt: skip

    @classmethod
    def of_first_tokens(cls, verdict: Verdict, begun: Sequence[int], room: Integers) -> "Outcome":
        """The first tokens of the rows `begun`, of a verdict `[B, 1]` on all rows; no round."""
        outcome = cls.of_one_chain(None, Proposal(verdict.tokens[:, :0]), verdict, room)
        outcome.accepted[:] = -1
        outcome.accepted[:, begun] = 0
        return outcome

    @property
    def counts(self) -> Integers:
        """`[B]`: how many of `tokens` each row may take."""
        counts: Integers = 1 + self.accepted[self.winner, np.arange(len(self.winner))]
        return counts

    def of_each_drafter(self, values: Integers) -> dict[int, list[int]]:
        """`values` `[N, B]` sorted by drafter: B values each, -1 where the row has no chain of it."""
        found: dict[int, list[int]] = {}
        for own, of_lane in zip(self.owners, values.tolist(), strict=True):
            for row, which in enumerate(own):
                if which >= 0:
                    found.setdefault(which, [-1] * len(own))[row] = of_lane[row]
        return found
