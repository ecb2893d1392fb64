"""Several drafters in one round: each row verifies the chains it was given, and goes on with the longest (SA §4.2).

The paper races whole requests, each drafter with a verifier of its own. In one process a row's chains share a target
forward instead, and the race is decided anew in each round. All of them are verified with the noise of the row's own
positions, so that they can only agree: which of them wins decides how far a round gets, and never a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...scheduling.control import Chain
from .rows import Rows
from .verification import Proposal, Verdict


def draft_lengths(plan: Sequence[Chain], batch: int) -> dict[int, list[int]]:
    """γ of each of `batch` rows by drafter that any has a chain of, in the order of the plan; 0: the row has none."""
    lengths: dict[int, list[int]] = {}
    for chain in plan:
        own = lengths.setdefault(chain.which, [0] * batch)
        for row in range(batch) if chain.rows is None else chain.rows:
            own[row] = max(own[row], chain.draft_length)
    return {which: own for which, own in lengths.items() if any(own)}


@dataclass(frozen=True)
class ChainLayout:
    """A row's chains side by side behind its last committed token, for one target forward of W = 1 + Σγ slots:

        slot       0   |  1    2    3  |  4    5  |  6    7    8      row of L committed tokens, chains a, b, c
        token     x_L  |  a1   a2   a3 |  b1   b2 |  c1   c2   c3
        column    L-1  |  L   L+1  L+2 | L+3  L+4 | L+5  L+6  L+7     where its K/V is written
        position  L-1  |  L   L+1  L+2 |  L   L+1 |  L   L+1  L+2     for RoPE, windows and chunks
        b2 sees    x   |  .    .    .  |  x    x  |  .    .    .      and all committed columns

    So columns and positions say what a query sees: of the columns behind L - 1 those up to its own that, by its own
    distance between column and position, lie at positions from L on. Rows with less than W slots repeat their last
    token as a chain that nobody reads.

    Args:
        tokens: `[B, W]` int64.
        columns: `[B, W]` int64.
        positions: `[B, W]` int64.
        slots: `[N, B, γ + 1]` int64 for the longest chain's γ: of each lane's chain, with slot 0 before it. Behind a
            chain's end they mean nothing.
    """

    tokens: Tensor
    columns: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, rows: Rows, widths: Tensor, proposals: Sequence[Proposal], width: int) -> "ChainLayout":
        """Lays out the chains of N lanes.

        Args:
            rows: that they continue.
            widths: `[N, B]` int64, slots of each chain.
            proposals: one per lane.
            width: Σγ of the row with most.
        """
        columns = rows.columns_behind(-1, width + 1)  # [B, W]
        slot = torch.arange(1, width + 1, device=columns.device)  # [W - 1]
        tokens = rows.window(-1, 1).expand(-1, width)  # [B, W - 1]
        ends = widths.cumsum(0)[..., None]  # [N, B, 1]
        starts = ends - widths[..., None]  # [N, B, 1]
        shifts = ends[-1].expand(-1, width)  # [B, W - 1], column - position; at first: of the padding
        for start, end, proposal in zip(starts, ends, proposals, strict=True):
            own = (slot > start) & (slot <= end)  # [B, W - 1]
            step = (slot - 1 - start).clamp(0, proposal.tokens.shape[1] - 1)  # [B, W - 1]
            tokens = proposal.tokens.gather(1, step).where(own, tokens)
            shifts = start.where(own, shifts)
        steps = torch.arange(1 + max(proposal.tokens.shape[1] for proposal in proposals), device=columns.device)
        slots = (steps + starts).clamp(max=width).masked_fill(steps == 0, 0)  # [N, B, γ + 1]
        return cls(torch.cat([rows.window(-1, 1), tokens], dim=1), columns, columns - F.pad(shifts, (1, 0)), slots)

    def slots_of(self, lane: Tensor) -> Tensor:
        """`[B, γ + 1]` int64: slots of each row's chain in its lane `lane[b]` (`[B]` int64)."""
        return self.slots[lane, torch.arange(len(lane), device=lane.device)]


@dataclass(frozen=True)
class Lanes:
    """The chains of a round, sorted into lanes: lane n holds the n-th chain of each row, whoever drafted it.

    With one chain per row there is one lane, and the round is an ordinary one, though different drafters may have
    drafted for its rows. Further lanes make a race.

    Args:
        chains: of each row: who drafted them, and γ as planned: the slots they take, whatever was drafted.
        drafters: `[N, B]` int64, whose chain it is; -1: the row has none in this lane.
        drafted: by drafter, what it drafted for all rows: `[B, γ]`, γ that of its longest chain.
        proposals: N, at least one; `[B, γ]`, γ that of the lane's longest chain.
        layout: of a race.
    """

    chains: list[list[tuple[int, int]]]
    drafters: Tensor
    drafted: Mapping[int, Proposal]
    proposals: list[Proposal]
    layout: ChainLayout | None = None

    @classmethod
    def of(cls, rows: Rows, lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> "Lanes":
        """Sorts what was drafted.

        Args:
            rows: that it continues.
            lengths: what it was asked for, see :func:`draft_lengths`.
            drafted: by drafter.
        """
        batch, last = rows.active, rows.window(-1, 1)  # [B, 1]
        for which, own in lengths.items():
            if len(lengths) == 1 and len(set(own)) == 1:  # one drafter for all rows alike, as in most rounds
                return cls([[(which, own[0])]] * batch, last.new_full((1, batch), which), drafted, [drafted[which]])
        chains = [[(which, own[row]) for which, own in lengths.items() if own[row]] for row in range(batch)]
        lanes = [
            [mine[n] if n < len(mine) else (-1, 0) for mine in chains] for n in range(max([1, *map(len, chains)]))
        ]
        drafters, widths = torch.tensor(lanes, device=last.device).unbind(2)  # [N, B] each
        proposals = []
        for n, lane in enumerate(lanes):
            members = {which: drafted[which] for which, _ in lane if which >= 0}
            tokens = last.expand(-1, max(width for _, width in lane))  # [B, γ]
            proposals.append(_merge(members, drafters[n], widths[n], tokens))
        sorted_ = cls(chains, drafters, drafted, proposals)
        if len(lanes) == 1:
            return sorted_
        return replace(sorted_, layout=ChainLayout.of(rows, widths, proposals, sorted_.width))

    @property
    def width(self) -> int:
        """Σγ of the row with most."""
        return max(sum(width for _, width in mine) for mine in self.chains)

    def logits(self, lane: int, logits: Tensor) -> Tensor:
        """`[B, γ + 1, V]` of a race's `logits` `[B, W, V]`: those of the lane's chains."""
        assert self.layout is not None
        slots = self.layout.slots[lane, :, : self.proposals[lane].tokens.shape[1] + 1]  # [B, γ + 1]
        return logits[torch.arange(len(slots), device=slots.device)[:, None], slots]

    def verified(self, which: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What the target said to a drafter's own chains: of its logits `[B, W, V]` those `[B, γ + 1, V]`, γ that of
        its shortest chain; and which rows have one, `[B]` bool."""
        count = 1 + min(width for mine in self.chains for drafter, width in mine if drafter == which)
        own = self.drafters == which  # [N, B]
        if self.layout is None:
            return logits[:, :count], own[0]
        slots = self.layout.slots_of(own.int().argmax(0))[:, :count]  # [B, γ + 1]
        return logits[torch.arange(len(slots), device=slots.device)[:, None], slots], own.any(0)

    def by_drafter(self, values: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Values by lane and row as values of each drafter by row; -1 where the row has no chain of it."""
        found = {which: [-1] * len(self.chains) for which in self.drafted}
        for row, mine in enumerate(self.chains):
            for lane, (which, _) in enumerate(mine):
                found[which][row] = values[lane][row]
        return found


def _merge(members: Mapping[int, Proposal], drafters: Tensor, widths: Tensor, tokens: Tensor) -> Proposal:
    """One proposal `[B, γ]` of those of several drafters.

    Args:
        members: by drafter, of any γ.
        drafters: `[B]` int64, whose chain each row takes; -1: none.
        widths: `[B]` int64, how much of it at most.
        tokens: `[B, γ]` int64, what is verified where there is none.
    """
    lengths, logits = torch.zeros_like(widths), None  # [B]
    for which, proposal in members.items():
        own = drafters == which  # [B]
        count = min(tokens.shape[1], proposal.tokens.shape[1])
        missing = tokens.shape[1] - count
        mine = F.pad(own[:, None].expand(-1, count), (0, missing))  # [B, γ]
        tokens = F.pad(proposal.tokens[:, :count], (0, missing)).where(mine, tokens)
        lengths = proposal.lengths.where(own, lengths)
        if proposal.logits is not None:
            q = F.pad(proposal.logits[:, :count], (0, 0, 0, missing))  # [B, γ, V]
            logits = q if logits is None else q.where(own[:, None, None], logits)
    return Proposal(tokens, torch.minimum(lengths, widths), logits)


@dataclass(frozen=True)
class Outcome:
    """What the target made of a round's chains.

    Args:
        verdict: of the chain that each row takes.
        proposal: that chain.
        winner: `[B]` int64, its lane.
        drafted: `[N, B]` int64, draft tokens of each chain; 0 where the row has none.
        accepted: `[N, B]` int64, how many of them were accepted.
    """

    verdict: Verdict
    proposal: Proposal
    winner: Tensor
    drafted: Tensor
    accepted: Tensor

    @classmethod
    def of(cls, lanes: Lanes, verdicts: Sequence[Verdict]) -> "Outcome":
        """Takes for each row the chain of which most was accepted, the first among equals."""
        drafted = torch.stack([proposal.lengths for proposal in lanes.proposals])  # [N, B]
        accepted = torch.stack([verdict.accepted for verdict in verdicts])  # [N, B]
        if len(verdicts) == 1:
            return cls(verdicts[0], lanes.proposals[0], torch.zeros_like(drafted[0]), drafted, accepted)
        count, row = len(verdicts), torch.arange(drafted.shape[1], device=drafted.device)
        order = torch.arange(count - 1, -1, -1, device=drafted.device)[:, None]  # [N, 1]
        winner = (accepted * count + order).argmax(0)  # [B]

        def of_winner(parts: Sequence[Tensor]) -> Tensor:
            width = max(part.shape[1] for part in parts)
            return torch.stack([F.pad(part, (0, width - part.shape[1])) for part in parts])[winner, row]

        logprobs = [verdict.logprobs for verdict in verdicts if verdict.logprobs is not None]
        verdict = Verdict(
            of_winner([verdict.tokens for verdict in verdicts]),  # [B, γ + 1]
            accepted[winner, row],
            of_winner([verdict.scores for verdict in verdicts]),
            of_winner(logprobs) if logprobs else None,
        )
        proposal = Proposal(of_winner([proposal.tokens for proposal in lanes.proposals]), drafted[winner, row])
        return cls(verdict, proposal, winner, drafted, accepted)

    def up_to_end(self, kept: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """`drafted` and `accepted` without what lies behind a row's end, given the tokens `kept` (`[B]` int64) and
        which rows ended (`[B]` bool)."""
        return torch.minimum(self.drafted, kept).where(ends, self.drafted), torch.minimum(self.accepted, kept)
