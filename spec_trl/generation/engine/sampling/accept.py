"""Acceptance of drafts: as far as they equal the target's tokens (exact verification, the default), or by rejection
sampling. The host reads the device once per round.

In a race a row verifies the chains of several drafters, and commits the longest accepted one (SA §4.2). The paper
races whole requests, one verifier per drafter. Here a row's chains share a target forward, and every round is a race.
All chains are verified with the noise of the row's positions, so accepted tokens are equal: the winner decides how
many tokens a round commits, never which.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...planner.control import Chain
from ..kv.memory import sent
from .noise import Draw, gumbel_noise, sample, token_logprobs, uniform_coins


if TYPE_CHECKING:
    from ..rows import Rows


Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for the rows in flight, all on their device or all on the host.

    Args:
        tokens: `[B, γ]` int64.
        lengths: `[B]` int64, number of drafts of the row; later tokens are padding. None: all.
        logits: `[B, γ, vocabulary]` processed draft logits; rejection verification needs them.
        scores: `[B, γ]`, perturbed logits of the tokens. A row's draft ends before a score of -inf: processors allowed
            no token. NaN: the drafter is broken. None: unknown.
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
        """The same on `device`; the host does not wait for the copies."""
        if self.tokens.device == device:
            return self
        parts = (self.lengths, self.logits, self.scores)
        return Proposal(sent(self.tokens, device), *(None if part is None else sent(part, device) for part in parts))

    def drafted(self) -> Tensor:
        """`[B]` int64: number of drafts by row, 0 if its drafter is broken."""
        batch, most = self.tokens.shape
        lengths = self.tokens.new_full((batch,), most) if self.lengths is None else self.lengths
        if self.scores is None:
            return lengths
        sound = (self.scores > -torch.inf).long().cumprod(1).sum(1)  # [B]
        return torch.minimum(lengths, sound).masked_fill(self.scores.isnan().any(1), 0)

    def within(self, vocabulary: int, remaining: Tensor | None) -> "Proposal":
        """The same with tokens outside of the `vocabulary` replaced by one of it, which is verified like any other.
        With `remaining` (`[B]`, most drafts that a row may take) `lengths` end before such a token, and at
        `remaining`."""
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
        want_logprobs: whether to compute `logprobs`.

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


class Judged(NamedTuple):
    """Result of a lane's proposal, on the host. A row's next tokens are the first `accepted + 1` of `tokens` `[B, γ +
    1]`, of which the first `sound` `[B]` come from finite logits with some probability. `drafted`: `[B]` verified
    tokens. `is_broken`: `[B]`, rows whose drafter drew from NaN."""

    tokens: Integers
    sound: Integers
    drafted: Integers
    accepted: Integers
    is_broken: Bools


def judge(proposals: Sequence[Proposal], draws: Sequence[Draw], remaining: Integers) -> list[Judged]:
    """The lossless acceptance rule: accepts the drafts of every lane as far as they equal the target's tokens, for
    rows with `remaining` (`[B]`) tokens left.

    The target's token at a position does not depend on the draft, so the output is that of `"none"`:

        fed            x_t   d1   d2   d3        (x_t: last committed token)
        target token    y1   y2   y3   y4        accept d1 = y1, d2 = y2, ... up to the first difference;
        output          y1   y2   y3   y4        the y after the last accepted draft is corrected or bonus
    """
    parts = list[Tensor]()  # `[B, n]` each, n = 0 if there is nothing to read
    for proposal, drawn in zip(proposals, draws, strict=True):
        nothing = drawn.tokens[:, :0]
        parts += [
            drawn.tokens, drawn.scores.double(), proposal.tokens,
            nothing if proposal.scores is None else proposal.scores.double(),
            nothing if proposal.lengths is None else proposal.lengths[:, None],
            nothing if drawn.most is None else drawn.most[:, None],
        ]  # fmt: skip
    # The only place where a round waits for the device. float64 holds any token, and any score.
    read, at, judged = torch.cat(parts, dim=1).cpu().numpy(), 0, []
    pieces = []
    for part in parts:
        pieces.append(read[:, at : at + part.shape[1]])
        at += part.shape[1]
    for lane in range(0, len(pieces), 6):
        tokens, scores, drafts, draft_scores, lengths, most = pieces[lane : lane + 6]
        drafted = np.minimum(remaining - 1, drafts.shape[1])  # [B], leaves one for the token after the drafts
        if lengths.shape[1]:
            drafted = np.minimum(drafted, lengths[:, 0].astype(np.int64)).clip(min=0)
        is_broken = np.isnan(draft_scores).any(1)  # [B]
        if draft_scores.shape[1]:
            drafted = np.where(is_broken, 0, np.minimum(drafted, leading(draft_scores > -np.inf)))
        accepted = np.minimum(drafted, leading(drafts == tokens[:, :-1]))  # [B]
        if most.shape[1]:
            accepted = np.minimum(accepted, most[:, 0].astype(np.int64))
        judged.append(Judged(tokens.astype(np.int64), leading(scores > -np.inf), drafted, accepted, is_broken))
    return judged


def leading(holds: Bools) -> Integers:
    """`[B]`: number of leading True values in every row of `holds` `[B, n]`."""
    return np.logical_and.accumulate(holds, axis=1).sum(1)


@dataclass(frozen=True)
class Outcome:
    """Result of a round. In most rounds a row has at most one chain of drafts; the n-th chains of all rows are lane n.

    Args:
        drawn: on the winning chains, on the device.
        tokens: `[B, n]`, the same tokens on the host.
        counts: `[B]`, number of them that a row may take.
        sound: `[B]`, number of them from finite logits with some probability.
        winner: `[B]`, lane of the winning chain.
        width: largest number of draft tokens verified in any row.
        owners: N lists of B numbers, the drafter of the row's chain in the lane; -1: no chain.
        drafted: `[N, B]` draft tokens by chain; 0 without a chain.
        accepted: `[N, B]`, number of accepted ones; -1: the row takes no token.
        broken: drafters that drew from NaN.
        ends: `[B]`, whether the row ends with the last of its tokens; known once `counts` is final.
    """

    drawn: Draw
    tokens: Integers
    counts: Integers
    sound: Integers
    winner: Integers
    width: int
    owners: Sequence[Sequence[int]]
    drafted: Integers
    accepted: Integers
    broken: set[int]
    ends: Bools

    @classmethod
    def of(
        cls,
        proposals: Sequence[Proposal],
        draws: Sequence[Draw],
        owners: Sequence[Sequence[int]],
        width: int,
        remaining: Integers,
    ) -> "Outcome":
        """Chooses for every row the chain with most accepted tokens, the first among equals. `proposals`, `draws`: one
        per lane, at least one; `remaining`: `[B]`, tokens left by row."""
        judged = judge(proposals, draws, remaining)
        drawn, first = draws[0], judged[0]
        tokens, sound, drafted, accepted = first.tokens, first.sound, first.drafted[None], first.accepted[None]
        winner = np.zeros(len(remaining), np.int64)
        if len(judged) > 1:
            drafted = np.stack([lane.drafted for lane in judged])  # [N, B]
            accepted = np.stack([lane.accepted for lane in judged])  # [N, B]
            winner, rows = accepted.argmax(0), np.arange(len(remaining))  # [B] each
            most = max([lane.tokens.shape[1] for lane in judged])
            padded = [np.pad(lane.tokens, ((0, 0), (0, most - lane.tokens.shape[1]))) for lane in judged]
            tokens = np.stack(padded)[winner, rows]
            sound = np.stack([lane.sound for lane in judged])[winner, rows]
            drawn = _of_winner(draws, winner)
        broken = set[int]()
        for of_rows, lane in zip(owners, judged, strict=False):  # no owners if nothing was drafted
            broken.update(itertools.compress(of_rows, lane.is_broken))
        counts = accepted.max(0) + 1
        ends = np.zeros(len(counts), np.bool_)
        return cls(drawn, tokens, counts, sound, winner, width, owners, drafted, accepted, broken - {-1}, ends)

    def of_each_drafter(self, values: Integers) -> dict[int, list[int]]:
        """`values` `[N, B]` by drafter: B values each, -1 for rows without a chain of that drafter."""
        by_drafter: dict[int, list[int]] = {}
        for owners, of_lane in zip(self.owners, values.tolist(), strict=True):
            for row, which in enumerate(owners):
                if which >= 0:
                    by_drafter.setdefault(which, [-1] * len(owners))[row] = of_lane[row]
        return by_drafter


def _of_winner(draws: Sequence[Draw], winner: Integers) -> Draw:
    """Returns the draw of every row in its lane `winner[b]` (`[B]`)."""
    lane, width = sent(torch.from_numpy(winner), draws[0].tokens.device), max(draw.tokens.shape[1] for draw in draws)
    row = torch.arange(len(winner), device=lane.device)

    def pick(parts: Sequence[Tensor]) -> Tensor:  # [B, n_i] of each lane -> [B, n]
        return torch.stack([F.pad(part, (0, width - part.shape[1])) for part in parts])[lane, row]

    logprobs = [draw.logprobs for draw in draws if draw.logprobs is not None]
    return Draw(
        pick([draw.tokens for draw in draws]),
        pick([draw.scores for draw in draws]),
        pick(logprobs) if logprobs else None,
    )


# ---- races ----------------------------------------------------------------------------------------------------------


def draft_lengths(plan: Sequence[Chain], batch: int) -> dict[int, list[int]]:
    """γ of `batch` rows, by drafter in the order of the plan; 0: the row has no chain of that drafter."""
    lengths: dict[int, list[int]] = {}
    for chain in plan:
        rows = range(batch) if chain.rows is None else chain.rows
        if rows and chain.draft_length > 0:
            of_rows = lengths.setdefault(chain.which, [0] * batch)
            for row in rows:
                of_rows[row] = max(of_rows[row], chain.draft_length)
    return lengths


@dataclass(frozen=True)
class ChainLayout:
    """A row's chains next to each other after its last committed token, for one target forward of W = 1 + Σγ slots:

        slot       0   |  1    2    3  |  4    5  |  6    7    8      row of L committed tokens, chains a, b, c
        token     x_L  |  a1   a2   a3 |  b1   b2 |  c1   c2   c3
        column    L-1  |  L   L+1  L+2 | L+3  L+4 | L+5  L+6  L+7     where its K/V is written
        position  L-1  |  L   L+1  L+2 |  L   L+1 |  L   L+1  L+2     for RoPE, windows and chunks
        b2 sees    x   |  .    .    .  |  x    x  |  .    .    .      and all committed columns

    Of the columns after L - 1 a query sees those up to its column whose position is at least L, with the query's
    difference of column and position. Rows with fewer than W slots repeat their last token.

    Args:
        tokens, columns, positions: `[B, W]` int64.
        slots: `[N, B, γ + 1]` int64 for the longest chain's γ: slots of a lane's chain, with slot 0 before it;
            undefined after the chain's end.
    """

    tokens: Tensor
    columns: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, rows: "Rows", widths: Tensor, proposals: Sequence[Proposal], width: int) -> "ChainLayout":
        """Lays out the chains of N lanes: one proposal per lane, with `widths` `[N, B]` int64 slots; `width`: the
        largest Σγ of a row."""
        columns = rows.columns_after(-1, width + 1)  # [B, W]
        slot = torch.arange(1, width + 1, device=columns.device)  # [W - 1]
        tokens = rows.window(-1, 1).expand(-1, width)  # [B, W - 1]
        ends = widths.cumsum(0)[..., None]  # [N, B, 1]
        starts = ends - widths[..., None]  # [N, B, 1]
        shifts = ends[-1].expand(-1, width)  # [B, W - 1], column - position; first of the padding
        for start, end, proposal in zip(starts, ends, proposals, strict=True):
            is_its = (slot > start) & (slot <= end)  # [B, W - 1]
            step = (slot - 1 - start).clamp(0, proposal.tokens.shape[1] - 1)  # [B, W - 1]
            tokens = proposal.tokens.gather(1, step).where(is_its, tokens)
            shifts = start.where(is_its, shifts)
        steps = torch.arange(1 + max(proposal.tokens.shape[1] for proposal in proposals), device=columns.device)
        slots = (steps + starts).clamp(max=width).masked_fill(steps == 0, 0)  # [N, B, γ + 1]
        return cls(torch.cat([rows.window(-1, 1), tokens], dim=1), columns, columns - F.pad(shifts, (1, 0)), slots)

    def slots_of(self, lane: Tensor) -> Tensor:
        """`[B, γ + 1]` int64: slots of the row's chain in lane `lane[b]` (`[B]` int64)."""
        return self.slots[lane, torch.arange(len(lane), device=lane.device)]


@dataclass(frozen=True)
class Lanes:
    """The chains of a round: lane n holds the n-th chain of every row, of any drafter. More than one lane: a race.

    Args:
        lengths: planned γ by drafter and row: the slots of a chain, whatever was drafted.
        owners: N lists of B numbers, the drafter of the row's chain; -1: no chain. Empty: nothing was drafted.
        drafters: `[N, B]` int64, the same on the device; None: there is at most one, with the same γ for all rows.
        proposals: one per lane, at least one; `[B, γ]` with γ of the lane's longest chain.
        width: largest Σγ of a row.
        layout: of a race.
    """

    lengths: Mapping[int, list[int]]
    owners: list[list[int]]
    drafters: Tensor | None
    proposals: list[Proposal]
    width: int
    layout: ChainLayout | None = None

    @classmethod
    def of(cls, rows: "Rows", lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> "Lanes":
        """Sorts `drafted` proposals, by drafter, into lanes of `rows`; `lengths`: planned (:func:`draft_lengths`)."""
        if not lengths:
            return cls(lengths, [], None, [Proposal(rows.tokens[: rows.active, :0])], 0)
        if len(lengths) == 1:
            ((which, of_rows),) = lengths.items()
            if min(of_rows) == max(of_rows):
                return cls(lengths, [[which] * rows.active], None, [drafted[which]], of_rows[0])
        last = rows.window(-1, 1)  # [B, 1]
        of_row = [[(which, γ[row]) for which, γ in lengths.items() if γ[row]] for row in range(rows.active)]
        lanes = [[of[n] if n < len(of) else (-1, 0) for of in of_row] for n in range(max(map(len, of_row)))]
        drafters, widths = sent(torch.tensor(lanes), last.device).unbind(2)  # [N, B] each
        proposals = []
        for n, lane in enumerate(lanes):
            members = {which: drafted[which] for which, _ in lane if which >= 0}
            tokens = last.expand(-1, max(width for _, width in lane))  # [B, γ]
            proposals.append(_merge(members, drafters[n], widths[n], tokens))
        width = max(map(sum, zip(*lengths.values(), strict=True)))
        layout = ChainLayout.of(rows, widths, proposals, width) if len(lanes) > 1 else None
        owners = [[which for which, _ in lane] for lane in lanes]
        return cls(lengths, owners, drafters, proposals, width, layout)

    def logits(self, lane: int, logits: Tensor) -> Tensor:
        """`[B, γ + 1, V]`: the target's `logits` `[B, W, V]` on the lane's chains."""
        if self.layout is None:
            return logits
        return _at_slots(logits, self.layout.slots[lane, :, : self.proposals[lane].tokens.shape[1] + 1])

    def verified(self, which: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits on the chains of one drafter, `[B, γ + 1, V]` with γ that of its shortest chain, of all
        its `logits` `[B, W, V]`; and which rows have a chain of it, `[B]` bool."""
        if self.drafters is None:
            return logits, logits.new_ones(len(logits), dtype=torch.bool)
        count = 1 + min(filter(None, self.lengths[which]))
        is_its = self.drafters == which  # [N, B]
        if self.layout is None:
            return logits[:, :count], is_its[0]
        return _at_slots(logits, self.layout.slots_of(is_its.int().argmax(0))[:, :count]), is_its.any(0)


def _at_slots(logits: Tensor, slots: Tensor) -> Tensor:
    """`[B, n, V]` of logits `[B, W, V]`, given slots `[B, n]` int64."""
    return logits[torch.arange(len(slots), device=slots.device)[:, None], slots]


def _merge(members: Mapping[int, Proposal], drafters: Tensor, widths: Tensor, tokens: Tensor) -> Proposal:
    """Combines proposals of several drafters, the `members`, with any γ, into one `[B, γ]`: a row takes at most
    `widths` tokens of the drafter in `drafters` (`[B]` int64 each), and `tokens` `[B, γ]` if that is -1."""
    lengths, logits, scores = torch.zeros_like(widths), None, None  # [B]
    for which, proposal in members.items():
        is_its = drafters == which  # [B]
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
