"""Defines the statistics of a `generate` call as plain data, without torch and transformers. `record.py` computes
them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from ..planner.control import Tally


DEPTH_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Lower edges of the output-depth bins in tokens; from 512 on those of ER Tab. 7."""
MOST_CHANGES = 32
"""Most changes in the timeline of one request; more are merged."""
MOST_PLANS = 128
"""Most changes of the plan of a rollout: about as many as a figure can show."""
FEWEST_DRAFTED = 10
"""Drafted rounds below which no gain is reported: the seconds of one round vary by a third (standard deviation), those
of ten by a tenth."""


def added(one: Any, other: Any) -> Any:
    """Adds two dataclasses field by field, dictionaries by key (a missing key counts as zero), numbers."""
    if isinstance(one, Mapping):
        missing = {key: value for key, value in other.items() if key not in one}
        return {key: added(value, other[key]) if key in other else value for key, value in one.items()} | missing
    if is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in fields(one)]
        return type(one)(**{name: added(vars(one)[name], vars(other)[name]) for name in names})
    return one + other


@dataclass
class DraftCounts:
    """Counts over the rounds that speculated."""

    drafted: int = 0
    """Draft tokens up to a row's end."""
    accepted: int = 0
    blocks: int = 0
    """Verified rows."""
    first_drafted: int = 0
    """`drafted` and `accepted` of each block's first draft token alone."""
    first_accepted: int = 0
    committed: int = 0
    """Tokens that these rounds added to the output."""

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        total: DraftCounts = added(self, other)
        return total

    @property
    def block_efficiency(self) -> float:
        """τ: tokens per verified block, the bonus or corrected token included (ER §2.1). NaN without blocks."""
        return self.committed / self.blocks if self.blocks else math.nan

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens. NaN without drafts."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def first_token_acceptance(self) -> float:
        """Share of blocks whose first draft token was accepted (ER App. D). NaN without drafts."""
        return self.first_accepted / self.first_drafted if self.first_drafted else math.nan


@dataclass
class LearningStatistics:
    """Updates of a drafter that learns while it drafts (TTS).

    Args:
        updates: updates that began.
        seconds: of these updates.
        waited: seconds that decoding waited for them.
        bytes: peak memory of learning in addition to the drafter.
    """

    updates: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    bytes: int = 0


@dataclass
class BestOfNStatistics:
    """Rows with several chains in a round; the longest accepted one won.

    Args:
        rounds: rounds with such rows.
        wins: chains that won, by drafter.
        losses: chains that lost, by drafter.
        wasted: verified draft tokens that were not committed, by drafter; rejected tokens of winners included.
        winners: `wins` by row of the batch.
        winners_by_depth: `wins` by output depth before the round; keys are lower edges of `DEPTH_EDGES`.
    """

    rounds: int = 0
    wins: dict[str, int] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    wasted: dict[str, int] = field(default_factory=dict)
    winners: list[dict[str, int]] = field(default_factory=list)
    winners_by_depth: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tail:
    """Seconds and decoding rounds of the last requests."""

    seconds: float
    rounds: int


@dataclass
class RoundPoint:
    """Measured rounds of like shape.

    Args:
        batch: rows.
        length: mean cached tokens per row.
        draft_length: γ, 0 for autoregressive decoding; else the most draft tokens verified in any row.
        drafter: its strategy, several joined by "+". None: none drafted, or the log is older than this field.
        seconds: sum over these rounds, without a drafter's learning.
        tokens: committed by these rounds.
    """

    batch: int
    length: float
    draft_length: int
    drafter: str | None = None
    rounds: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass
class RequestTimeline:
    """Who drafted for one request.

    Args:
        request: its row in the caller's batch.
        changes: (seconds since the start, round counted from 0, names of the drafters from then on), at most
            `MOST_CHANGES`. The first is when the request got a row. Several names: they draft together; none: plain
            decoding.
        ended: seconds since the start.
    """

    request: int
    changes: list[tuple[float, int, list[str]]] = field(default_factory=list)
    ended: float = 0.0


class PlanChange(NamedTuple):
    """The plan of the rounds from `round` on, counted from 0. `draft_length` and `drafter` are those of a
    `RoundPoint`; `rows` are in flight (None: the log is older than this field)."""

    round: int
    draft_length: int
    rows: int | None = None
    drafter: str | None = None


def plain_seconds_within(estimate: float, common: float, least: float, most: float) -> float:
    """An `estimate` for plain decoding, held within what the rounds that drafted can have saved or lost:

        common + Σ p_r  <=  plain seconds  <=  common + Σ p_r t_r / B_r          over rounds r that drafted

    A drafted round of B_r rows commits t_r tokens, at least one per row: it replaces at least one plain round of p_r
    seconds, and did the work of t_r / B_r. All other rounds are in both ways of decoding, and their estimate is noise:
    a call of s seconds never gains more than Σ (p_r t_r / B_r - s_r).

    Args:
        estimate: seconds.
        common: seconds of prompts and of rounds without drafts, the same in plain decoding.
        least, most: the two sums, seconds. Where they contradict each other, `most` holds.
    """
    return common + min(max(estimate - common, least), most)


def gain(plain_seconds: float | None, seconds: float, drafted_rounds: float) -> float | None:
    """Speedup over plain decoding. None: `plain_seconds` is unknown, or too few rounds drafted."""
    return plain_seconds / seconds if plain_seconds and seconds and drafted_rounds >= FEWEST_DRAFTED else None


def too_few(drafted_rounds: float) -> str:
    count = round(drafted_rounds)
    many = "1 round with drafts is" if count == 1 else f"{count} rounds with drafts are"
    return f"{many} too few to show a gain ({FEWEST_DRAFTED})"


def slowest(timelines: Sequence[RequestTimeline], count: int) -> list[RequestTimeline]:
    """The `count` requests that ended last, in order."""
    return sorted(timelines, key=lambda timeline: timeline.ended)[-count:]


@dataclass
class SpeculationStatistics:
    """Statistics of one `generate` call.

    Args:
        strategy: the `assistant_strategy` asked for.
        exact: True: drafts and other rows change no bit of a log-probability. A list: names of parts that are not
            exact. None: not tested.
        total, per_request: draft counts over all rows, and by row; of several chains of a row only the winner.
        per_depth: the same by output depth at the start of a block; keys are lower edges of `DEPTH_EDGES`.
        per_drafter: draft counts by drafter over all its chains. A chain counts as a block whether it won or not;
            `committed` is what it alone would have added to the output.
        best_of_n: of rows with several chains; None: there were none.
        tokens: generated tokens, EOS included, padding excluded.
        logprob_sum: log-probabilities (nats) of the sampled tokens under the processed target distribution; 0 if not
            requested.
        target_forwards, draft_forwards: network forwards, prefill included.
        rounds: decoding rounds, of one target forward each. The first token of most rows comes from the prefill.
        ended_in: by row, its last round, counted from 1; the number of earlier rounds if it ended with its first
        token.
        timeline: who drafted for a row, and when. Like `ended_in` it lacks rows that other ranks decoded.
        speculating: changes of the plan, at most `MOST_PLANS`.
        points: measured rounds by batch, bin of length, γ and drafter.
        predicted_speedup: mean prediction over the rounds that drafted; without such rounds the largest prediction.
            None: nothing was predicted.
        measured_speedup: plain seconds over measured seconds of the rounds that drafted, for the same tokens. None:
            the plain seconds are unknown.
        reason: why the rounds drafted or did not, in a sentence.
        plain_seconds: estimate for plain decoding of the same tokens, from measured rounds or a profile that they
            correct, within what drafts can have saved (:func:`plain_seconds_within`). None: unknown.
        completion_curve: (seconds since the start, finished requests) whenever requests finished.
        phase_seconds: "prefill", "noise", "draft", "verify", "accept", "compact", "control", and "learn" where a
            drafter learns.
        seconds: from the first prompt to the last token.
        setup_seconds: of the call before that. A first call loads drafters, compiles, probes the machine and tries
            exactness; later calls take milliseconds.
        cache_bytes: peak of the K/V caches, drafters' included: on a CPU under Linux of written pages, in a pool of
            pages that rows had, else of the whole caches.
        preemptions: how often a row left for want of memory. Its K/V is computed again when it returns.
        tokens_read: tokens of prompts and of returned rows with K/V computed by the target.
        graphs, graph_bytes: captured forwards of target and drafters, and device memory that they take in addition to
            weights and caches.
        copied_bytes: of 16-bit copies of the target's wider weights, under autocast.
        learning: None: no drafter learns while it drafts.
        tallies: rounds by strategy, with their seconds and predictions.
        drafter_failure: why the drafter was dropped, or None.
    """

    strategy: str
    exact: bool | list[str] | None = None
    total: DraftCounts = field(default_factory=DraftCounts)
    per_request: list[DraftCounts] = field(default_factory=list)
    per_depth: dict[int, DraftCounts] = field(default_factory=dict)
    per_drafter: dict[str, DraftCounts] = field(default_factory=dict)
    best_of_n: BestOfNStatistics | None = None
    tokens: int = 0
    logprob_sum: float = 0.0
    target_forwards: int = 0
    draft_forwards: int = 0
    rounds: int = 0
    ended_in: list[int] = field(default_factory=list)
    timeline: list[RequestTimeline] = field(default_factory=list)
    speculating: list[PlanChange] = field(default_factory=list)
    points: list[RoundPoint] = field(default_factory=list)
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    reason: str = ""
    plain_seconds: float | None = None
    completion_curve: list[tuple[float, int]] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    setup_seconds: float = 0.0
    cache_bytes: int = 0
    preemptions: int = 0
    tokens_read: int = 0
    graphs: int = 0
    graph_bytes: int = 0
    copied_bytes: int = 0
    learning: LearningStatistics | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)
    drafter_failure: str | None = None

    @property
    def block_efficiency(self) -> float:
        """τ over all rows."""
        return self.total.block_efficiency

    @property
    def acceptance_rate(self) -> float:
        return self.total.acceptance_rate

    @property
    def first_token_acceptance(self) -> float:
        return self.total.first_token_acceptance

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def drafted_rounds(self) -> int:
        return sum(point.rounds for point in self.points if point.draft_length)

    def __str__(self) -> str:
        share = self.drafted_rounds / self.rounds if self.rounds else 0.0
        drafted, speedups = self.drafted_rounds, {"predicted": self.predicted_speedup}
        if drafted >= FEWEST_DRAFTED:
            speedups |= {
                "measured": self.measured_speedup,
                "whole call": gain(self.plain_seconds, self.seconds, drafted),
            }
        setup = f", after {self.setup_seconds:.2f} s of setup" if self.setup_seconds >= self.seconds / 20 else ""
        lines = [
            f"{self.strategy}: {self.tokens} tokens in {self.seconds:.2f} s, {self.tokens_per_second:.1f} tokens/s"
            + setup,
            f"drafting in {share:.0%} of {self.rounds} rounds: {self.reason}",
        ]
        if self.total.drafted:
            lines.append(f"block efficiency {self.block_efficiency:.2f}, acceptance rate {self.acceptance_rate:.2f}")
        if known := [f"{name} {speedup:.2f}×" for name, speedup in speedups.items() if speedup is not None]:
            lines.append(f"speedup over plain decoding: {', '.join(known)}")
        if 0 < drafted < FEWEST_DRAFTED:
            lines.append(too_few(drafted))
        return "\n".join(lines)

    def tail(self, share: float = 0.5) -> Tail:
        """Decoding from the end of at least `share` of the requests to the end of the last one (SA §4.2).

        Raises:
            ValueError: `share` is not in 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} is out of range; it must be 0 to 1.")
        count = math.ceil(share * len(self.ended_in) - 1e-9)  # 0.07 * 100 is a little more than 7
        rounds, seconds = [0, *sorted(self.ended_in)], [(0.0, 0), *self.completion_curve]
        started = next(second for second, finished in seconds if finished >= count)
        return Tail(seconds[-1][0] - started, rounds[-1] - rounds[count])
