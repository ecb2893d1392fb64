"""Accepting drafts, on the host: one read of the device per round says how far each row gets."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .verification import Proposal, Verdict


Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


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
