"""What one generation did, as plain data."""

import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

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
class RoundPoint:
    """Measured rounds of like shape: `rounds` of `batch` rows with mean length `length` and γ = `draft_length`
    (0: autoregressive) by the drafter called `drafter`, which took `seconds` and committed `tokens` in all."""

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
        total: draft counts over all rows.
        per_request: the same for each row of the batch.
        per_depth: the same by output depth at the start of a block; keys are lower edges of `DEPTH_EDGES`.
        tokens: generated tokens, each row's EOS included, padding not.
        logprob_sum: sum of the log-probabilities of the sampled tokens under the processed target distribution
            (nats); 0 when logprobs were not asked for.
        target_forwards, draft_forwards: network forwards, prefill included.
        rounds: decoding rounds (one target forward each).
        speculating: for each change, (round, draft length); 0 is autoregressive decoding.
        points: measured rounds by (batch, length bin, γ, drafter).
        predicted_speedup: mean over the speculative rounds by the roofline; None without one.
        measured_speedup: of the speculative rounds over the autoregressive time that the corrected roofline gives the
            same tokens; None without a roofline.
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
    tokens: int = 0
    logprob_sum: float = 0.0
    target_forwards: int = 0
    draft_forwards: int = 0
    rounds: int = 0
    speculating: list[tuple[int, int]] = field(default_factory=list)
    points: list[RoundPoint] = field(default_factory=list)
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
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


class RoundLog:
    """Collects rounds while decoding."""

    def __init__(self) -> None:
        self._points: dict[tuple[int, int, int, str | None], RoundPoint] = {}
        self._spans: list[tuple[int, int]] = []
        self.rounds = 0

    def add(
        self, batch: int, length: float, draft_length: int, drafter: str | None, seconds: float, tokens: int
    ) -> None:
        """Adds one round; see :class:`RoundPoint`."""
        if not self._spans or self._spans[-1][1] != draft_length:
            self._spans.append((self.rounds, draft_length))
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
