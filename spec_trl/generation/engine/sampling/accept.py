"""Accepts drafts as far as they equal the target's tokens, or by rejection sampling. A row has at most one chain of
drafts in a round. The host reads the device once per round."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...planner.control import Chain
from ..kv.memory import sent
from ..rows import Integers, Rows
from .noise import Draw, gumbel_noise, sample, token_logprobs, uniform_coins


Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for the rows in flight, all on their device or all on the host.

    Args:
        tokens: `[B, γ]` int64.
        lengths: `[B]` int64, number of drafts of the row; later tokens are padding. None: all.
        logits: `[B, γ, vocabulary]` processed draft logits, for rejection verification.
        scores: `[B, γ]`, perturbed logits of the tokens. A draft ends before a score of -inf: processors allowed no
            token. NaN: the drafter is broken. None: unknown.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None

    def checked(self, batch: int, draft_length: int, vocabulary: int) -> "Proposal":
        """Itself; raises ValueError where tokens are not `[batch, draft_length]` int64, lengths `[batch]` int64,
        logits `[batch, draft_length, vocabulary]`, or scores `[batch, draft_length]`."""
        shape = (batch, draft_length, vocabulary)
        for name, tensor, expected in (
            ("tokens", self.tokens, shape[:2]),
            ("lengths", self.lengths, shape[:1]),
            ("logits", self.logits, shape),
            ("scores", self.scores, shape[:2]),
        ):
            is_wrong = tensor is not None and name in ("tokens", "lengths") and tensor.dtype != torch.int64
            if tensor is not None and (tensor.shape != expected or is_wrong):
                raise ValueError(
                    f"proposed {name} of shape {tuple(tensor.shape)} ({tensor.dtype}); expected {expected}"
                    + (" of int64" if is_wrong else "")
                )
        return self

    def to(self, device: torch.device) -> "Proposal":
        """Copies to `device` without waiting."""
        if self.tokens.device == device:
            return self
        parts = (self.lengths, self.logits, self.scores)
        return Proposal(sent(self.tokens, device), *(None if part is None else sent(part, device) for part in parts))

    def drafted(self) -> Tensor:
        """`[B]` int64: number of drafts; 0 where the drafter is broken."""
        batch, most = self.tokens.shape
        lengths = self.tokens.new_full((batch,), most) if self.lengths is None else self.lengths
        if self.scores is None:
            return lengths
        sound = (self.scores > -torch.inf).long().cumprod(1).sum(1)  # [B]
        return torch.minimum(lengths, sound).masked_fill(self.scores.isnan().any(1), 0)

    def within(self, vocabulary: int, remaining: Tensor | None) -> "Proposal":
        """The same with tokens outside of the `vocabulary` replaced by an ordinary token of it. With `remaining`
        (`[B]`, most drafts of a row) `lengths` end before such a token, and at `remaining`."""
        tokens = self.tokens.clamp(0, vocabulary - 1)  # [B, γ]
        if remaining is None:
            return replace(self, tokens=tokens)
        exist = (tokens == self.tokens).long().cumprod(1).sum(1)  # [B]
        return replace(self, tokens=tokens, lengths=torch.minimum(self.drafted(), remaining).minimum(exist).relu())


def verify_rejection(
    logits: Tensor, proposal: Proposal, lengths: Tensor, keys: Tensor, residual_keys: Tensor, want_logprobs: bool
) -> Draw:
    """Accepts a draft token with min(1, p/q) and resamples max(p - q, 0) at the first rejection.

    Leviathan et al. 2023, Algorithm 1; Chen et al. 2023; ER §2.1. The coins and the resampling noise are independent
    of the noise the drafter sampled with.

    Args:
        logits: `[B, γ + 1, vocabulary]` processed target logits p.
        proposal: the drafts, with their logits q.
        lengths: `[B]` int64, number of drafts to test by row.
        keys, residual_keys: `[B, γ + 1]` int64, of the coins and of the resampling noise.

    Returns:
        The drafts and the resampled tokens, with a score of 0 for drafts; `most`: number of accepted drafts.
    """
    assert proposal.logits is not None
    batch, drafts = torch.arange(len(logits), device=logits.device), proposal.tokens
    p = logits.softmax(dim=-1)  # [B, γ + 1, V]
    q = proposal.logits.softmax(dim=-1).to(p.dtype)  # [B, γ, V]
    p_draft = p[:, :-1].gather(2, drafts[..., None]).squeeze(2)  # [B, γ]
    q_draft = q.gather(2, drafts[..., None]).squeeze(2)  # [B, γ]
    passed = uniform_coins(keys[:, :-1]) * q_draft < p_draft  # [B, γ]
    passed &= torch.arange(drafts.shape[1], device=drafts.device) < lengths[:, None]
    accepted = passed.long().cumprod(dim=1).sum(dim=1)  # [B]

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
    return Draw(tokens, scores, token_logprobs(logits, tokens) if want_logprobs else None, accepted)


@dataclass(frozen=True)
class Verdict:
    """Result of a proposal, on the host. A row's next tokens are the first `accepted + 1` of `tokens`.

    Args:
        tokens: `[B, γ + 1]`, drawn from the target.
        sound: `[B]`, number of first ones from finite logits with some probability.
        drafted: `[B]`, number of verified drafts.
        accepted: `[B]`, number of accepted ones; -1: the row takes no token.
        is_broken: `[B]`, rows whose drafter drew from NaN.
    """

    tokens: Integers
    sound: Integers
    drafted: Integers
    accepted: Integers
    is_broken: Bools


def judge(parts: Sequence[NDArray[Any]], remaining: Integers) -> Verdict:
    """The lossless acceptance rule: accepts drafts as far as they equal the target's tokens, for rows with `remaining`
    (`[B]`) tokens left. `parts`: of one proposal, from :func:`on_host`.

    The target's token at a position does not depend on the draft, so the output is that of `"none"`:

        fed            x_t   d1   d2   d3        (x_t: last committed token)
        target token    y1   y2   y3   y4        accept d1 = y1, d2 = y2, ... up to the first difference;
        output          y1   y2   y3   y4        the y after the last accepted draft is corrected or bonus
    """
    tokens, scores, drafts, draft_scores, lengths, most = parts
    drafted = np.minimum(remaining - 1, drafts.shape[1])  # [B], leaves one for the token after the drafts
    if lengths.shape[1]:
        drafted = np.minimum(drafted, lengths[:, 0].astype(np.int64)).clip(min=0)
    is_broken = np.isnan(draft_scores).any(1)  # [B]
    if draft_scores.shape[1]:
        drafted = np.where(is_broken, 0, np.minimum(drafted, leading(draft_scores > -np.inf)))
    accepted = np.minimum(drafted, leading(drafts == tokens[:, :-1]))  # [B]
    if most.shape[1]:
        accepted = np.minimum(accepted, most[:, 0].astype(np.int64))
    return Verdict(tokens.astype(np.int64), leading(scores > -np.inf), drafted, accepted, is_broken)


def leading(holds: Bools) -> Integers:
    """`[B]`: number of leading True values in every row of `holds` `[B, n]`."""
    return np.logical_and.accumulate(holds, axis=1).sum(1)


def on_host(proposals: Sequence[Proposal], draws: Sequence[Draw]) -> list[tuple[NDArray[Any], ...]]:
    """Copies the inputs of :func:`judge` to the host: the only place where a round waits for the device. Six parts
    `[B, n]` for each proposal and its draws, n = 0 if absent: the target's tokens and scores; drafts, their scores and
    lengths; and the most drafts that a row may take."""
    parts = list[Tensor]()
    for proposal, drawn in zip(proposals, draws, strict=True):
        nothing = drawn.tokens[:, :0]
        parts += [
            drawn.tokens, drawn.scores.double(), proposal.tokens,
            nothing if proposal.scores is None else proposal.scores.double(),
            nothing if proposal.lengths is None else proposal.lengths[:, None],
            nothing if drawn.most is None else drawn.most[:, None],
        ]  # fmt: skip
    read, at = torch.cat(parts, dim=1).cpu().numpy(), 0  # float64 holds any token, and any score
    pieces = []
    for part in parts:
        pieces.append(read[:, at : at + part.shape[1]])
        at += part.shape[1]
    return [*zip(*[iter(pieces)] * 6, strict=True)]


@dataclass(frozen=True)
class Drafts:
    """The drafts of a round: at most one chain per row, of any drafter.

    Args:
        lengths: planned γ by drafter and row.
        owners: `[B]`, the drafter of the row's chain; -1: no chain.
        drafters: `[B]` int64, the same on the device; None: at most one drafter, with the same γ for all rows.
        proposal: `[B, γ]` with the largest γ.
        width: largest number of draft tokens to verify in any row.
    """

    lengths: Mapping[int, list[int]]
    owners: Any
    drafters: Tensor | None
    proposal: Proposal
    width: int

    @classmethod
    def of(cls, rows: Rows, lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> "Drafts":
        """Combines `drafted` proposals, by drafter, for `rows`; `lengths`: planned (:func:`draft_lengths`)."""
        if not lengths:
            return cls(lengths, [-1] * rows.active, None, Proposal(rows.tokens[: rows.active, :0]), 0)
        if len(lengths) == 1:
            ((drafter, of_rows),) = lengths.items()
            if min(of_rows) == max(of_rows):
                return cls(lengths, [drafter] * rows.active, None, drafted[drafter], of_rows[0])
        owners = [next((drafter for drafter, own in lengths.items() if own[row]), -1) for row in range(rows.active)]
        widths = [lengths[drafter][row] if drafter >= 0 else 0 for row, drafter in enumerate(owners)]
        last = rows.window(-1, 1)  # [B, 1]
        drafters, most = sent(torch.tensor([owners, widths]), last.device)  # [B] each
        proposal = merge(drafted, drafters, most, last.expand(-1, max(widths)))
        return cls(lengths, owners, drafters, proposal, max(widths))

    def verified(self, drafter: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits on the chains of one drafter, `[B, γ + 1, V]` with γ of the shortest chain, from all its
        `logits` `[B, W, V]`; and `[B]` bool: rows with a chain of the drafter."""
        if self.drafters is None:
            return logits, logits.new_ones(len(logits), dtype=torch.bool)
        return logits[:, : 1 + min(filter(None, self.lengths[drafter]))], self.drafters == drafter


def draft_lengths(plan: Sequence[Chain], batch: int) -> dict[int, list[int]]:
    """γ of `batch` rows, by drafter in the order of the plan; 0: the row has no chain of that drafter."""
    lengths: dict[int, list[int]] = {}
    for chain in plan:
        rows = range(batch) if chain.rows is None else chain.rows
        if rows and chain.draft_length > 0:
            of_rows = lengths.setdefault(chain.drafter, [0] * batch)
            for row in rows:
                of_rows[row] = max(of_rows[row], chain.draft_length)
    return lengths


@dataclass(frozen=True)
class Outcome:
    """Result of a round.

    Args:
        drawn: the target's tokens `[B, n]`, on the device; `tokens`: the same on the host.
        counts: `[B]`, number of tokens that a row may take.
        sound: `[B]`, number of tokens from finite logits with some probability.
        width: largest number of draft tokens verified in any row.
        owners: `[B]`, the drafter of the row's chain; -1: no chain.
        drafted, accepted: `[B]` tokens of the chain; 0 without one. accepted is -1 if the row takes no token.
        broken: drafters that drew from NaN.
        ends: `[B]`, whether the row ends with the last of its tokens; known once `counts` is final.
    """

    drawn: Draw
    tokens: Integers
    counts: Integers
    sound: Integers
    width: int
    owners: Any
    drafted: Integers
    accepted: Integers
    broken: set[int]
    ends: Bools

    @classmethod
    def of(cls, drafts: Drafts, drawn: Draw, remaining: Integers) -> "Outcome":
        """The outcome of `drafts` with `drawn` `[B, γ + 1]`; `remaining`: `[B]`, tokens left by row."""
        verdict = judge(on_host([drafts.proposal], [drawn])[0], remaining)
        counts, broken = verdict.accepted + 1, set(itertools.compress(drafts.owners, verdict.is_broken)) - {-1}
        ends, judged = np.zeros(len(counts), np.bool_), (verdict.drafted, verdict.accepted)
        return cls(drawn, verdict.tokens, counts, verdict.sound, drafts.width, drafts.owners, *judged, broken, ends)

    def of_each_drafter(self, values: Integers) -> dict[int, list[int]]:
        """`values` `[B]` by drafter: B values each, -1 for rows without a chain of that drafter."""
        found: dict[int, list[int]] = {}
        for row, (drafter, value) in enumerate(zip(self.owners, values.tolist(), strict=True)):
            if drafter >= 0:
                found.setdefault(drafter, [-1] * len(self.owners))[row] = value
        return found


def merge(members: Mapping[int, Proposal], drafters: Tensor, widths: Tensor, tokens: Tensor) -> Proposal:
    """Merges proposals of several drafters (`members`, any γ) into one `[B, γ]`: a row takes at most `widths` tokens
    of its drafter in `drafters` (`[B]` int64 each), or `tokens` `[B, γ]` where that is -1."""
    lengths, logits, scores = torch.zeros_like(widths), None, None  # [B]
    for drafter, proposal in members.items():
        is_its = drafters == drafter  # [B]
        count = min(tokens.shape[1], proposal.tokens.shape[1])
        missing = tokens.shape[1] - count
        mine = F.pad(is_its[:, None].expand(-1, count), (0, missing))  # [B, γ]
        tokens = F.pad(proposal.tokens[:, :count], (0, missing)).where(mine, tokens)
        lengths = (count if proposal.lengths is None else proposal.lengths) * is_its + lengths.masked_fill(is_its, 0)
        if proposal.scores is not None:
            scores = torch.zeros_like(tokens, dtype=proposal.scores.dtype) if scores is None else scores  # [B, γ]
            scores = F.pad(proposal.scores[:, :count], (0, missing)).where(mine, scores)
        if proposal.logits is not None:
            q = F.pad(proposal.logits[:, :count], (0, 0, 0, missing))  # [B, γ, V]
            logits = q if logits is None else q.where(is_its[:, None, None], logits)
    return Proposal(tokens, torch.minimum(lengths, widths), logits, scores)
