"""Verifies several chains of a row in one round (races, SA §4.2). A row verifies the chains of several drafters, and
commits the longest accepted one.

The paper races whole requests, one verifier per drafter. Here a row's chains share a target forward, and every round
is a race. All chains are verified with the noise of the row's positions, so accepted tokens are equal: the winner
decides how many tokens a round commits, but no token. A control with `several_chains` is served by `RacingRollout`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...generation.engine.kv.memory import sent
from ...generation.engine.record import DraftedChains, Round, counts_of
from ...generation.engine.rollout import Rollout
from ...generation.engine.rows import Integers, Request, Rows
from ...generation.engine.sampling.accept import Drafts, Outcome, Proposal, judge, merge, on_host
from ...generation.engine.sampling.noise import Draw, RoundNoise
from ...generation.engine.statistics import DEPTH_EDGES, BestOfNStatistics, DraftCounts, SpeculationStatistics
from ...generation.planner.control import Chain, Control, Explanation, PlainRounds


class RacingRollout(Rollout):
    """A rollout whose rows may have several chains in a round."""

    _features: Tensor | None  # of the last forward over several chains, if there are listeners

    def _take(self) -> list[Request]:
        taken = super()._take()
        if taken:
            self.control = self.control.control if isinstance(self.control, RaceHelper) else self.control
            method = getattr(self.queue, "method", None)  # of a `RacingPool`
            if method is not None:
                self.control = RaceHelper(self.control, self.drafters.names.index(method))
        return taken

    def _arrange(self, lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> Drafts:
        chains = (np.array([*lengths.values()]) > 0).sum(0)  # [B], by row
        return (Lanes if chains.max(initial=0) > 1 else Drafts).of(self.rows, lengths, drafted)

    def _forward(self, drafts: Drafts) -> Tensor:
        if not isinstance(drafts, Lanes):
            return super()._forward(drafts)
        columns = self.rows.longest + drafts.width
        logits, self._features = self.target.forward_at(drafts.tokens, drafts.positions, columns, drafts.columns)
        return logits

    def _judge(self, drafts: Drafts, logits: Tensor, noise: RoundNoise | None) -> Outcome:
        """Keeps the K/V and the hidden states of every row's winning chain."""
        if not isinstance(drafts, Lanes):
            return super()._judge(drafts, logits, noise)
        draws = [self._draw(lane, drafts.of_lane(n, logits), noise) for n, lane in enumerate(drafts.proposals)]
        outcome = RaceOutcome.of_lanes(drafts, draws, self.rows.remaining)
        slots = drafts.slots_of(sent(torch.from_numpy(outcome.winner), logits.device))  # [B, γ + 1]
        positions = drafts.columns[:, :1] + torch.arange(slots.shape[1], device=slots.device)  # [B, γ + 1]
        self.target.cache.move_columns(drafts.columns.gather(1, slots), positions)
        if self._features is not None:
            width = self._features.shape[2]
            self.target.call_listeners(self._features.gather(1, slots[..., None].expand(-1, -1, width)), positions)
        del self._features
        return self._until_stop(outcome)

    def _commit(self, outcome: Outcome) -> tuple[list[int], int]:
        result = super()._commit(outcome)
        if isinstance(outcome, RaceOutcome):
            round_ = self.record.rounds[-1]
            assert round_.chains is not None
            round_.chains = RacedChains.of_lanes(round_.chains, outcome.winner)
        return result


class RaceHelper(Control):
    """Control of a rank that races for rows of another rank: candidate `drafter` drafts in every round.

    Args:
        control: of the rank; decides again after the race.
        drafter: index of the candidate.
    """

    def __init__(self, control: Control, drafter: int) -> None:
        self.control = control
        self.candidates, self.tallies = control.candidates, control.tallies
        self._drafter = drafter
        self._batch = 0

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        self._batch = len(requests)
        candidate = self.candidates[self._drafter]
        return () if self._batch > candidate.max_rows else (Chain(self._drafter, candidate.draft_length),)

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if draft_length:
            self.tallies[self._drafter].add_round(self._batch, tokens, seconds)

    def drop(self, index: int) -> None:
        self.control.drop(index)

    def finish(self) -> None:
        self.control.finish()

    def explain(self) -> Explanation:
        return self.control.explain()

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        return self.control.plain_seconds(rounds)


# ---- the chains of a round ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lanes(Drafts):
    """The chains of a race: lane n holds the n-th chain of every row, of any drafter. A row's chains lie next to each
    other after its last committed token, in one target forward of W = 1 + Σγ slots:

        slot       0   |  1    2    3  |  4    5  |  6    7    8      row of L committed tokens, chains a, b, c
        token     x_L  |  a1   a2   a3 |  b1   b2 |  c1   c2   c3
        column    L-1  |  L   L+1  L+2 | L+3  L+4 | L+5  L+6  L+7     where its K/V is written
        position  L-1  |  L   L+1  L+2 |  L   L+1 |  L   L+1  L+2     for RoPE, windows and chunks
        b2 sees    x   |  .    .    .  |  x    x  |  .    .    .      and all committed columns

    A query sees those columns after L - 1, up to its own, whose position is at least L, with the query's difference of
    column and position. Rows with fewer than W slots repeat their last token.

    Args:
        owners: N lists of B numbers, the drafter of the row's chain; -1: no chain.
        drafters: `[N, B]` int64, the same on the device.
        proposal: of the first lane.
        width: largest Σγ of a row.
        proposals: one per lane, `[B, γ]` with γ of the lane's longest chain.
        tokens, columns, positions: `[B, W]` int64.
        slots: `[N, B, γ + 1]` int64 for the longest chain's γ: slots of a lane's chain, with slot 0 before it;
            undefined after the chain's end.
    """

    proposals: list[Proposal]
    tokens: Tensor
    columns: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, rows: Rows, lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> "Lanes":
        of_row = [[(drafter, γ[row]) for drafter, γ in lengths.items() if γ[row]] for row in range(rows.active)]
        lanes = [[of[n] if n < len(of) else (-1, 0) for of in of_row] for n in range(max(map(len, of_row)))]
        width = max(map(sum, zip(*lengths.values(), strict=True)))
        columns, last = rows.columns_after(-1, width + 1), rows.window(-1, 1)  # [B, W], [B, 1]
        drafters, widths = sent(torch.tensor(lanes), last.device).unbind(2)  # [N, B] each
        slot = torch.arange(1, width + 1, device=last.device)  # [W - 1]
        ends = widths.cumsum(0)[..., None]  # [N, B, 1]
        starts = ends - widths[..., None]  # [N, B, 1]
        tokens, shifts = last.expand(-1, width), ends[-1].expand(-1, width)  # [B, W - 1]: padding; column - position
        proposals = []
        for n, lane in enumerate(lanes):
            members = {drafter: drafted[drafter] for drafter, _ in lane if drafter >= 0}
            most = max(count for _, count in lane)
            proposals.append(merge(members, drafters[n], widths[n], last.expand(-1, most)))
            is_its = (slot > starts[n]) & (slot <= ends[n])  # [B, W - 1]
            step = (slot - 1 - starts[n]).clamp(0, most - 1)  # [B, W - 1]
            tokens = proposals[n].tokens.gather(1, step).where(is_its, tokens)
            shifts = starts[n].where(is_its, shifts)
        steps = torch.arange(1 + max(count for lane in lanes for _, count in lane), device=last.device)
        slots = (steps + starts).clamp(max=width).masked_fill(steps == 0, 0)  # [N, B, γ + 1]
        laid_out = torch.cat([last, tokens], dim=1), columns, columns - F.pad(shifts, (1, 0)), slots
        owners = [[drafter for drafter, _ in lane] for lane in lanes]
        return cls(lengths, owners, drafters, proposals[0], width, proposals, *laid_out)

    def slots_of(self, lane: Tensor) -> Tensor:
        """`[B, γ + 1]` int64: slots of the row's chain in lane `lane[b]` (`[B]` int64)."""
        return self.slots[lane, torch.arange(len(lane), device=lane.device)]

    def of_lane(self, lane: int, logits: Tensor) -> Tensor:
        """`[B, γ + 1, V]`: the target's `logits` `[B, W, V]` on the lane's chains."""
        return _at_slots(logits, self.slots[lane, :, : self.proposals[lane].tokens.shape[1] + 1])

    def verified(self, drafter: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        assert self.drafters is not None
        is_its = self.drafters == drafter  # [N, B]
        slots = self.slots_of(is_its.int().argmax(0))[:, : 1 + min(filter(None, self.lengths[drafter]))]
        return _at_slots(logits, slots), is_its.any(0)


def _at_slots(logits: Tensor, slots: Tensor) -> Tensor:
    """`[B, n, V]` of logits `[B, W, V]`, given slots `[B, n]` int64."""
    return logits[torch.arange(len(slots), device=slots.device)[:, None], slots]


@dataclass(frozen=True)
class RaceOutcome(Outcome):
    """Result of a race. `drawn` and `tokens` are on the winning chains; `owners`, `drafted` and `accepted` are `[N,
    B]`, of the chains in N lanes; `winner` is `[B]`, the lane of the winning chain."""

    winner: Integers

    @classmethod
    def of_lanes(cls, lanes: Lanes, draws: Sequence[Draw], remaining: Integers) -> "RaceOutcome":
        """Chooses for every row the chain with most accepted tokens, the first among equals."""
        judged = [judge(parts, remaining) for parts in on_host(lanes.proposals, draws)]
        drafted, accepted = np.stack([lane.drafted for lane in judged]), np.stack([lane.accepted for lane in judged])
        winner, row = accepted.argmax(0), np.arange(len(remaining))  # [B] each
        most = max([lane.tokens.shape[1] for lane in judged])
        tokens = np.stack([np.pad(lane.tokens, ((0, 0), (0, most - lane.tokens.shape[1]))) for lane in judged])
        sound = np.stack([lane.sound for lane in judged])[winner, row]
        broken = set[int]()
        for owners, lane in zip(lanes.owners, judged, strict=True):
            broken.update(itertools.compress(owners, lane.is_broken))
        return cls(
            _of_winner(draws, winner), tokens[winner, row], accepted.max(0) + 1, sound, lanes.width, lanes.owners,
            drafted, accepted, broken - {-1}, np.zeros(len(row), np.bool_), winner,
        )  # fmt: skip

    def of_each_drafter(self, values: Integers) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for owners, of_lane in zip(self.owners, values.tolist(), strict=True):
            for row, drafter in enumerate(owners):
                if drafter >= 0:
                    found.setdefault(drafter, [-1] * len(owners))[row] = of_lane[row]
        return found


def _of_winner(draws: Sequence[Draw], winner: Integers) -> Draw:
    """Returns the draw of every row in its lane `winner[b]` (`[B]`)."""
    lane, width = sent(torch.from_numpy(winner), draws[0].tokens.device), max(draw.tokens.shape[1] for draw in draws)
    row = torch.arange(len(winner), device=lane.device)

    def pick(parts: Sequence[Any]) -> Any:  # [B, n_i] of each lane -> [B, n]
        if parts[0] is None:
            return None
        inner = (0, 0) * (parts[0].dim() - 2)
        return torch.stack([F.pad(part, (*inner, 0, width - part.shape[1])) for part in parts])[lane, row]

    names = ("tokens", "scores", "logprobs", "kept")
    return Draw(**{name: pick([getattr(draw, name) for draw in draws]) for name in names})


# ---- statistics -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RacedChains(DraftedChains):
    """The verified chains of a race; without `lanes` the winning ones. `lanes`: owners, drafted and accepted tokens,
    `[N, B]` each, of the chains in N lanes; `winner`: `[B]`, the lane of the winning chain."""

    lanes: tuple[Any, Any, Any]
    winner: Integers

    @classmethod
    def of_lanes(cls, chains: DraftedChains, winner: Integers) -> "RacedChains":
        """Takes `chains` with `[N, B]` owners, drafted and accepted tokens, and the `winner` of each row."""
        lanes, row = (chains.owners, chains.drafted, chains.accepted), np.arange(len(winner))
        owners, drafted, accepted = [of_lanes[winner, row] for of_lanes in lanes]
        return cls(chains.depths, owners, drafted, accepted, chains.committed, lanes, winner.astype(np.int64))

    @staticmethod
    def count_others(statistics: SpeculationStatistics, rounds: Sequence[Round], label_of: Integers) -> None:
        """Adds lost chains to `per_drafter`, and fills in `best_of_n`; `label_of`: place in `per_drafter` by
        drafter."""
        labels, requests = list(statistics.per_drafter), len(statistics.per_request)
        lost, wasted = np.zeros((len(labels), 6), np.int64), np.zeros(len(labels), np.int64)
        # By whether the chain won; of rows with several chains.
        ended = np.zeros((2, requests, len(labels)), np.int64)
        won_at_depth = np.zeros((len(DEPTH_EDGES), len(labels)), np.int64)
        raced = [(each.requests, each.chains) for each in rounds if isinstance(each.chains, RacedChains)]
        for of_rows, chains in raced:
            (owners, drafted, accepted), winner = chains.lanes, chains.winner  # [N, B] each, [B]
            lane, row = (owners >= 0).nonzero()  # of each chain
            label, wins = label_of[owners[lane, row]], winner[row] == lane
            np.add.at(lost, label[~wins], counts_of(drafted, accepted, chains.committed)[lane, row][~wins])
            several = (owners >= 0).sum(0)[row] > 1
            lane, row, label, wins = lane[several], row[several], label[several], wins[several]
            np.add.at(wasted, label, drafted[lane, row] - accepted[lane, row] * wins)
            np.add.at(ended, (wins.astype(np.int64), np.array(of_rows)[row], label), 1)
            depth = np.searchsorted(DEPTH_EDGES, chains.depths, side="right") - 1  # [B]
            np.add.at(won_at_depth, (depth[row], label), wins)

        def by_name(values: Integers) -> dict[str, int]:
            return dict(zip(labels, values.tolist(), strict=True))

        for name, counts in zip(labels, lost.tolist(), strict=True):
            statistics.per_drafter[name] += DraftCounts(*counts)
        (losses, wins), at_edges = ended.sum(1), zip(DEPTH_EDGES, won_at_depth, strict=True)
        statistics.best_of_n = BestOfNStatistics(
            len(raced), by_name(wins), by_name(losses), by_name(wasted), [by_name(row) for row in ended[1]],
            {edge: by_name(row) for edge, row in at_edges if row.any()},
        )  # fmt: skip
