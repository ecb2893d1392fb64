"""What one generation did, as plain data."""

import math
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from .timeline import RequestTimeline
from .verification import Proposal, Verdict


DEPTH_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Lower edges of the output-depth bins in tokens; from 512 on those of ER Tab. 7."""


@dataclass
class DraftCounts:
    """Counts over the rounds that speculated.

    `blocks` counts verified rows, `drafted` and `accepted` draft tokens up to a row's end, `committed` tokens that
    such rounds added to the output, `first_*` the first draft token of each block alone.
    """

    drafted: int = 0
    accepted: int = 0
    blocks: int = 0
    first_drafted: int = 0
    first_accepted: int = 0
    committed: int = 0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(*map(operator.add, astuple(self), astuple(other)))

    @property
    def block_efficiency(self) -> float:
        """τ: tokens per verified block, the bonus or corrected token included (ER §2.1). NaN without blocks."""
        return self.committed / self.blocks if self.blocks else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens. NaN without drafts."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def first_token_acceptance(self) -> float:
        """Share of blocks whose first draft token was accepted (ER App. D). NaN without drafts."""
        return self.first_accepted / self.first_drafted if self.first_drafted else float("nan")


@dataclass
class LearningStatistics:
    """What a drafter learned while it drafted (TTS).

    `updates` are those begun, `seconds` the time that they took, `waited` the time that decoding stood still for them,
    `bytes` the most memory that learning held beside the drafter."""

    updates: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    bytes: int = 0


@dataclass
class RacingStatistics:
    """What races came to: of the rounds in which some row had several chains, those rows alone.

    Args:
        rounds: with a race.
        wins: chains that won their row's race, by drafter.
        losses: chains that did not.
        wasted: draft tokens that were verified and not committed, by drafter; the winners' rejected ones count too.
        winners: `wins` for each row of the batch.
        winners_by_depth: `wins` by output depth at the start of the race; keys are lower edges of `DEPTH_EDGES`.
    """

    rounds: int = 0
    wins: dict[str, int] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    wasted: dict[str, int] = field(default_factory=dict)
    winners: list[dict[str, int]] = field(default_factory=list)
    winners_by_depth: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tail:
    """What the last requests took: `seconds`, and `rounds`, each of which is one target forward (prompts of requests
    that waited for a row are read in further ones)."""

    seconds: float
    rounds: int


@dataclass
class RoundPoint:
    """Measured rounds of like shape: `rounds` of `batch` rows with mean length `length` and γ = `draft_length`
    (0: autoregressive) by the drafter called `drafter`, which took `seconds` and committed `tokens` in all.

    Where several drafted, `drafter` joins their names by "+", and γ counts all that was verified of the row with most.
    """

    batch: int
    length: float
    draft_length: int
    drafter: str | None
    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0


LENGTH_BIN = 128
"""Rounds whose mean lengths fall into the same bin of this width are one point."""


@dataclass
class SpeculationStatistics:
    """Statistics of one `generate` call.

    Args:
        strategy: the `assistant_strategy` asked for.
        total: draft counts over all rows; of a row that was raced, those of the chain that won.
        per_request: the same for each row of the batch.
        per_depth: the same by output depth at the start of a block; keys are lower edges of `DEPTH_EDGES`.
        per_drafter: draft counts of all the chains of each drafter, by name. A block is a chain here, whether or not
            it won; `committed` is what it would have added to the output by itself.
        racing: of the rows that were raced; None: none was.
        tokens: generated tokens, each row's EOS included, padding not.
        logprob_sum: sum of the log-probabilities of the sampled tokens under the processed target distribution
            (nats); 0 when logprobs were not asked for.
        target_forwards, draft_forwards: network forwards, prefill included.
        rounds: decoding rounds (one target forward each), which are the forwards until the last row ended.
        ended_in: the round in which each row of the batch ended, counted from 1.
        timeline: who drafted for each row of the batch, and when.
        speculating: for each change, (round, draft length); 0 is autoregressive decoding.
        points: measured rounds by (batch, length bin, γ, drafter).
        predicted_speedup: mean over the speculative rounds by the roofline or ladder, or, where there were none, the
            largest that was predicted; None without either.
        measured_speedup: of the speculative rounds over the autoregressive time that the corrected roofline or ladder
            gives the same tokens; None without either.
        reason: why the rounds drafted or did not, in a sentence.
        plain_seconds: what plain decoding of the same tokens would have taken, by rounds measured in this call or
            before it and by the profile that they correct; None: neither is there.
        completion_curve: (seconds since start, requests finished so far), one entry per round that finished any.
        phase_seconds: "prefill", "noise", "draft", "verify", "accept", "compact", "control", and "learn" where a
            drafter learns.
        seconds: whole call.
        cache_bytes: K/V cache, a small drafter's own included.
        graphs: captured forwards that the target and its drafters hold.
        graph_bytes: device memory that they take beside weights and cache.
        learning: of a drafter that learns while it drafts; else None.
        drafter_failure: why the drafter was dropped, or None.
    """

    strategy: str
    total: DraftCounts = field(default_factory=DraftCounts)
    per_request: list[DraftCounts] = field(default_factory=list)
    per_depth: dict[int, DraftCounts] = field(default_factory=dict)
    per_drafter: dict[str, DraftCounts] = field(default_factory=dict)
    racing: RacingStatistics | None = None
    tokens: int = 0
    logprob_sum: float = 0.0
    target_forwards: int = 0
    draft_forwards: int = 0
    rounds: int = 0
    ended_in: list[int] = field(default_factory=list)
    timeline: list[RequestTimeline] = field(default_factory=list)
    speculating: list[tuple[int, int]] = field(default_factory=list)
    points: list[RoundPoint] = field(default_factory=list)
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    reason: str = ""
    plain_seconds: float | None = None
    completion_curve: list[tuple[float, int]] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    cache_bytes: int = 0
    graphs: int = 0
    graph_bytes: int = 0
    learning: LearningStatistics | None = None
    drafter_failure: str | None = None

    @property
    def block_efficiency(self) -> float:
        """τ over all rows; see :attr:`DraftCounts.block_efficiency`."""
        return self.total.block_efficiency

    @property
    def acceptance_rate(self) -> float:
        """See :attr:`DraftCounts.acceptance_rate`."""
        return self.total.acceptance_rate

    @property
    def first_token_acceptance(self) -> float:
        """See :attr:`DraftCounts.first_token_acceptance`."""
        return self.total.first_token_acceptance

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the seconds of the whole call."""
        return self.tokens / self.seconds if self.seconds else float("nan")

    def __str__(self) -> str:
        """A short summary."""
        share = self.drafted_rounds / self.rounds if self.rounds else 0.0
        whole = self.plain_seconds / self.seconds if self.plain_seconds and self.drafted_rounds else None
        speedups = {"predicted": self.predicted_speedup, "measured": self.measured_speedup, "whole call": whole}
        lines = [
            f"{self.strategy}: {self.tokens} tokens in {self.seconds:.2f} s, {self.tokens_per_second:.1f} tokens/s",
            f"drafting in {share:.0%} of {self.rounds} rounds: {self.reason}",
        ]
        if self.total.drafted:
            lines.append(f"block efficiency {self.block_efficiency:.2f}, acceptance rate {self.acceptance_rate:.2f}")
        if known := [f"{name} {speedup:.2f}×" for name, speedup in speedups.items() if speedup is not None]:
            lines.append(f"speedup over plain decoding: {', '.join(known)}")
        return "\n".join(lines)

    @property
    def drafted_rounds(self) -> int:
        """Rounds in which something was drafted."""
        return sum(point.rounds for point in self.points if point.draft_length)

    def tail(self, share: float = 0.5) -> Tail:
        """From when at least `share` of the requests had ended until the last one had (SA §4.2). 0: the whole of
        decoding.

        Raises:
            ValueError: `share` is not in 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} is out of range; it must be 0 to 1.")
        count = math.ceil(share * len(self.ended_in) - 1e-9)  # 0.07 * 100 is a little more than 7
        rounds, seconds = [0, *sorted(self.ended_in)], [(0.0, 0), *self.completion_curve]
        begun = next(second for second, finished in seconds if finished >= count)
        return Tail(seconds[-1][0] - begun, rounds[-1] - rounds[count])


class RoundLog:
    """Collects rounds while decoding."""

    def __init__(self) -> None:
        self._points: dict[tuple[int, int, int, str | None], RoundPoint] = {}
        self._spans: list[tuple[int, int]] = []
        self.rounds = 0
        self.plain_rounds, self.plain_seconds = 0, 0.0
        """Before the first that drafted."""

    def add(
        self, batch: int, length: float, draft_length: int, drafter: str | None, seconds: float, tokens: int
    ) -> None:
        """Adds one round; see :class:`RoundPoint`."""
        if not self._spans or self._spans[-1][1] != draft_length:
            self._spans.append((self.rounds, draft_length))
        if self._spans[-1] == (0, 0):
            self.plain_rounds += 1
            self.plain_seconds += seconds
        self.rounds += 1
        key = (batch, int(length) // LENGTH_BIN, draft_length, drafter)
        point = self._points.get(key)
        if point is None:
            point = self._points[key] = RoundPoint(batch, 0.0, draft_length, drafter)
        point.length += (length - point.length) / (point.rounds + 1)
        point.rounds += 1
        point.seconds += seconds
        point.tokens += tokens

    def write_to(self, statistics: SpeculationStatistics) -> None:
        """Fills in `rounds`, `speculating` and `points`."""
        statistics.rounds = self.rounds
        statistics.speculating = self._spans
        statistics.points = list(self._points.values())


class DraftCounter:
    """Counts on the device, one addition per round, read once at the end.

    Args:
        requests: rows of the caller's batch.
        device: where the rows live.
    """

    def __init__(self, requests: int, device: torch.device) -> None:
        self._per_request = torch.zeros(requests, 6, dtype=torch.int64, device=device)
        self._per_depth = torch.zeros(len(DEPTH_EDGES), 6, dtype=torch.int64, device=device)
        self._edges = torch.tensor(DEPTH_EDGES[1:], device=device)

    def add(
        self, requests: Tensor, depths: Tensor, proposal: Proposal, verdict: Verdict, kept: Tensor, ends: Tensor
    ) -> None:
        """Adds one round: `requests`, `depths` (generated position) and `kept` tokens, each `[B]` int64; `ends` `[B]`
        bool says which rows ended in it."""
        # Drafts behind a row's end were never a chance.
        drafted = torch.where(ends, torch.minimum(proposal.lengths, kept), proposal.lengths)  # [B]
        accepted = torch.minimum(verdict.accepted, kept)
        counts = torch.stack(
            [drafted, accepted, torch.ones_like(kept), drafted.clamp(max=1), accepted.clamp(max=1), kept], dim=1
        )  # [B, 6], in the order of DraftCounts
        self._per_request.index_add_(0, requests, counts)
        self._per_depth.index_add_(0, torch.bucketize(depths, self._edges, right=True), counts)

    def write_to(self, statistics: SpeculationStatistics) -> None:
        """Fills in `total`, `per_request` and `per_depth`."""
        per_request = self._per_request.tolist()
        statistics.per_request = [DraftCounts(*counts) for counts in per_request]
        statistics.total = sum(statistics.per_request, DraftCounts())
        statistics.per_depth = {
            edge: DraftCounts(*counts)
            for edge, counts in zip(DEPTH_EDGES, self._per_depth.tolist(), strict=True)
            if counts[2]
        }


class ChainCounter:
    """Counts by drafter on the device, read once at the end.

    Args:
        requests: rows of the caller's batch.
        names: of the drafters; those of one name are counted together.
        device: where the rows live.
    """

    def __init__(self, requests: int, names: Sequence[str], device: torch.device) -> None:
        self._names, self._rounds = names, 0
        self._drafts = torch.zeros(len(names), 6, dtype=torch.int64, device=device)
        self._races = torch.zeros(len(names), 2, dtype=torch.int64, device=device)  # chains in races, wasted tokens
        self._won = torch.zeros(requests, len(names), dtype=torch.int64, device=device)
        self._won_by_depth = torch.zeros(len(DEPTH_EDGES), len(names), dtype=torch.int64, device=device)
        self._edges = torch.tensor(DEPTH_EDGES[1:], device=device)

    def add(
        self,
        requests: Tensor,
        depths: Tensor,
        drafters: Tensor,
        drafted: Tensor,
        accepted: Tensor,
        kept: Tensor,
        winner: Tensor,
    ) -> None:
        """Adds one round.

        Args:
            requests: `[B]` int64.
            depths: `[B]` int64, generated position.
            drafters: `[N, B]` int64, whose chain each row has in each lane; -1: it has none there.
            drafted: `[N, B]` int64 draft tokens of it, up to the row's end.
            accepted: `[N, B]` int64, of these.
            kept: `[B]` int64 tokens committed.
            winner: `[B]` int64, the lane that was taken.
        """
        ones = torch.ones_like(drafted)
        committed = torch.minimum(accepted + 1, kept)  # [N, B]
        firsts = drafted.clamp(max=1), accepted.clamp(max=1)
        counts = torch.stack([drafted, accepted, ones, *firsts, committed], dim=-1)  # [N, B, 6], as in DraftCounts
        present = drafters >= 0  # [N, B]
        whose = drafters.clamp(min=0).flatten()  # [N * B]
        self._drafts.index_add_(0, whose, (counts * present[..., None]).flatten(0, 1))
        if len(drafters) == 1:
            return
        self._rounds += 1
        raced = present & (present.sum(0) > 1)  # [N, B]
        won = raced & (torch.arange(len(drafters), device=winner.device)[:, None] == winner)  # [N, B]
        wasted = drafted - accepted.where(won, 0)  # [N, B]
        self._races.index_add_(0, whose, (torch.stack([ones, wasted], dim=-1) * raced[..., None]).flatten(0, 1))
        bins = torch.bucketize(depths, self._edges, right=True)  # [B]
        for total, own in ((self._won, requests), (self._won_by_depth, bins)):
            cells = (own * len(self._names) + drafters.clamp(min=0)).flatten()  # [N * B]
            total.view(-1).index_add_(0, cells, won.flatten().long())

    def write_to(self, statistics: SpeculationStatistics) -> None:
        """Fills in `per_drafter` and `racing`."""
        names = list(dict.fromkeys(self._names))

        def by_name(values: Sequence[int]) -> dict[str, int]:
            return {
                name: sum(value for own, value in zip(self._names, values, strict=True) if own == name)
                for name in names
            }

        for name, counts in zip(self._names, self._drafts.tolist(), strict=True):
            statistics.per_drafter[name] = statistics.per_drafter.get(name, DraftCounts()) + DraftCounts(*counts)
        if self._rounds:
            chains, wasted = (by_name(values) for values in self._races.T.tolist())
            winners = [by_name(values) for values in self._won.tolist()]
            wins = {name: sum(winner[name] for winner in winners) for name in names}
            losses = {name: chains[name] - wins[name] for name in names}
            by_depth = zip(DEPTH_EDGES, self._won_by_depth.tolist(), strict=True)
            winners_by_depth = {edge: by_name(values) for edge, values in by_depth if any(values)}
            statistics.racing = RacingStatistics(self._rounds, wins, losses, wasted, winners, winners_by_depth)


class PhaseTimer:
    """Seconds per phase. On CUDA by events, so that timing never makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `name`."""
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        if self._events:
            torch.cuda.synchronize()
            for name, start, end in self._events:
                self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3
            self._events.clear()
        return dict(self._seconds)
