"""Rounds of several drafters: a row verifies the chains that the plan names for it, and goes on with the longest
(SA §4.2).

The paper races whole requests, one verifier per drafter. Here a row's chains share a target forward, and every round
is a race. All chains are verified with the noise of the row's positions, so they can only agree: the winner decides
how far a round gets, and never a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...scheduling.control import Chain
from .accept import Proposal
from .memory import sent
from .rows import Rows


def draft_lengths(plan: Sequence[Chain], batch: int) -> dict[int, list[int]]:
    """γ of each of `batch` rows, for each drafter of the plan in its order; 0: the row has no chain of it."""
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

    Of the columns after L - 1 a query sees those up to its column that lie at positions from L on, by the distance
    between the query's column and position. Rows with less than W slots repeat their last token as a chain that nobody
    reads.

    Args:
        tokens, columns, positions: `[B, W]` int64.
        slots: `[N, B, γ + 1]` int64 for the longest chain's γ: of each lane's chain, with slot 0 before it. After a
            chain's end they mean nothing.
    """

    tokens: Tensor
    columns: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, rows: Rows, widths: Tensor, proposals: Sequence[Proposal], width: int) -> "ChainLayout":
        """Lays out the chains of N lanes: one of `proposals` each, with `widths` `[N, B]` int64 slots; `width`: the
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
        """`[B, γ + 1]` int64: slots of each row's chain in its lane `lane[b]` (`[B]` int64)."""
        return self.slots[lane, torch.arange(len(lane), device=lane.device)]


@dataclass(frozen=True)
class Lanes:
    """The chains of a round: lane n holds the n-th chain of each row, whoever drafted it. More than one lane: a race.

    Args:
        lengths: γ of each row as planned, by drafter: the slots that its chain takes, whatever was drafted.
        owners: N lists of B numbers, the drafter of each row's chain; -1: the row has none. Empty: nobody drafted.
        drafters: `[N, B]` int64, the same on the device; None: there is at most one, with the same γ for all rows.
        proposals: one for each lane, at least one; `[B, γ]`, γ that of the lane's longest chain.
        width: Σγ, of the row where it is largest.
        layout: of a race.
    """

    lengths: Mapping[int, list[int]]
    owners: list[list[int]]
    drafters: Tensor | None
    proposals: list[Proposal]
    width: int
    layout: ChainLayout | None = None

    @classmethod
    def of(cls, rows: Rows, lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> "Lanes":
        """Sorts what was `drafted`, by drafter, for `rows`; `lengths`: what was asked for (:func:`draft_lengths`)."""
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
        """`[B, γ + 1, V]`: those of the lane's chains, of the target's `logits` `[B, W, V]`."""
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
    """One proposal `[B, γ]` of those of several drafters, the `members`, which may have any γ: each row takes at most
    `widths` tokens of the one in `drafters` (`[B]` int64 each), and `tokens` `[B, γ]` where that is -1."""
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
