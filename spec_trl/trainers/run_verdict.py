"""Judges from a run's log whether speculation helped, and warns of a stale drafter."""

import math
import warnings
from dataclasses import dataclass, field

from ..generation.engine.statistics import added, gain, too_few
from .run_log import PlainCall, Record, RolloutRecord, Run, RunHeader, StepRecord


NOTABLE = 0.05
"""Seconds; a smaller value would print as 0.0."""
MORE = "Drafts pay with larger weights, fewer rows at a time, or texts that repeat."
COLLAPSE, COLLAPSE_FROM = 0.5, 0.3
"""Acceptance collapses when it falls below the share COLLAPSE of a rate of COLLAPSE_FROM or more."""
COLLAPSE_ERRORS = 4.0
"""Standard errors of the difference that noise does not reach: one in 30,000 by chance, and runs have thousands of
rollouts."""
LOOKUPS = ("history", "ngram")
"""Drafters without comparison: their acceptance depends on the texts, and no weights could go stale."""


@dataclass
class Verdict:
    """Sums over a run so far. Its text says in one sentence whether speculation helped the training rollouts.
    Refreshing and training the drafter are subtracted from the gain; one-time costs are named beside it.

    Args:
        compared: number of rollouts with known `plain_seconds`.
        seconds: of the compared rollouts, refreshing the drafter included, without setup.
        plain_seconds: predicted seconds of plain decoding for the compared rollouts.
        calibration_seconds: of a profile and a ladder, or of a probe.
        is_calibrated: whether a profile was used.
        setup_seconds: of training rollouts.
        adaptation_seconds: spent outside of rollouts.
        rounds, drafted_rounds: of all training rollouts.
        rounds_of: by strategy: rounds with its drafts.
        plain_rounds: timed rounds without drafts.
        reason: of the newest rollout; None: the log is older than this field.
        refused: number of calls that were plain, by reason.
    """

    rollouts: int = 0
    compared: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    calibration_seconds: float = 0.0
    is_calibrated: bool = False
    setup_seconds: float = 0.0
    adaptation_seconds: float = 0.0
    rounds: int = 0
    drafted_rounds: float = 0.0
    rounds_of: dict[str, float] = field(default_factory=dict)
    plain_rounds: int = 0
    reason: str | None = None
    refused: dict[str, int] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        if isinstance(record, RunHeader):
            self.calibration_seconds += record.calibration_seconds
            self.is_calibrated |= record.profile is not None
        elif isinstance(record, PlainCall):
            self.refused = added(self.refused, {record.reason: 1})
        elif not isinstance(record, RolloutRecord):
            self.adaptation_seconds += record.phases.get("adaptation", 0.0)
        elif record.mode == "train":
            self.rollouts += 1
            self.rounds += record.rounds
            self.setup_seconds += record.setup_seconds
            self.drafted_rounds += round(record.rounds * (record.sd_on_fraction or 0.0))
            drafted = {name: record.rounds * share for name, share in record.drafted_by.items() if share}
            self.rounds_of = added(self.rounds_of, drafted)
            self.plain_rounds += sum(point.rounds for point in record.points if not point.draft_length)
            self.reason = record.reason
            if record.plain_seconds is not None:
                self.compared += 1
                self.seconds += record.seconds - record.setup_seconds
                self.plain_seconds += record.plain_seconds

    @property
    def spent(self) -> float:
        """Seconds of the compared rollouts and of training the drafter, without one-time costs."""
        return self.seconds + self.adaptation_seconds

    @property
    def saved(self) -> float:
        """Seconds, without one-time costs; less than 0: lost."""
        return self.plain_seconds - self.spent

    @property
    def once(self) -> float:
        return self.calibration_seconds + self.setup_seconds

    def __str__(self) -> str:
        plain = ""
        if self.refused:
            count, why = sum(self.refused.values()), max(self.refused, key=self.refused.__getitem__)
            reasons = f", and {len(self.refused) - 1} more reasons" if len(self.refused) > 1 else ""
            plain = f"{count} {'call' if count == 1 else 'calls'} of generate did not speculate ({why}{reasons})"
        if not self.rollouts:
            return f"no training rollout was logged{plain and f': {plain}'}."
        once = {"calibration" if self.is_calibrated else "a probe": self.calibration_seconds}
        once["drafters and the trial of exactness"] = self.setup_seconds
        took = [f"{name} {_seconds(seconds)}" for name, seconds in once.items() if seconds >= NOTABLE]
        ends = (f"; once, beside this: {', '.join(took)}" if took else "") + (plain and f"; {plain}")
        costs = f"{'adaptation and ' if self.adaptation_seconds else ''}refresh"
        if not self.drafted_rounds:
            why = "" if self.reason is None else f" ({self.reason})"
            extra = f"; {costs} took {_seconds(-self.saved)}" if -self.saved >= NOTABLE else ""
            return f"nothing was drafted{why}: rollouts were plain decoding{extra}{ends}. {MORE}"
        share = f"drafting in {self.drafted_rounds / self.rounds:.0%} of {self.rounds:,} rounds"
        if len(self.rounds_of) > 1:
            by_rounds = sorted(self.rounds_of.items(), key=lambda item: -item[1])
            share += f" ({', '.join(f'{name} in {rounds / self.rounds:.0%}' for name, rounds in by_rounds)})"
        if not self.compared:
            why = "the log is older than this comparison" if self.reason is None else "no plain round was measured"
            return f"{share}; the speedup over plain decoding is not known: {why}{ends}."
        speedup = gain(self.plain_seconds, self.spent, self.drafted_rounds)
        if speedup is None:
            return f"{share}; {too_few(self.drafted_rounds)}{ends}."
        baseline = "" if self.plain_rounds else " as predicted (no round of the run was plain)"
        saved = f"{_seconds(abs(self.saved))} {'saved' if self.saved >= 0 else 'lost'} ({costs} subtracted)"
        known = f"; known of {self.compared} of {self.rollouts} rollouts" if self.compared < self.rollouts else ""
        return f"rollouts {speedup:.2f}× of plain decoding{baseline}, {saved}, {share}{known}{ends}."


def verdict_of(run: Run) -> tuple[Verdict, list[float]]:
    """The verdict on a run, and the seconds saved up to each training rollout and the steps after it, less one-time
    costs."""
    verdict, saved = Verdict(), list[float]()
    others: list[RunHeader | PlainCall] = [*run.headers, *run.plain_calls]
    for other in others:
        verdict.add(other)
    # A rollout's `step` counts the steps before it.
    records: list[RolloutRecord | StepRecord] = [*run.steps, *run.of("train")]
    for record in sorted(records, key=lambda record: record.step):  # steps stay before rollouts
        verdict.add(record)
        if isinstance(record, RolloutRecord):
            saved.append(verdict.saved - verdict.once)
        elif saved:
            saved[-1] = verdict.saved - verdict.once
    return verdict, saved


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


class CollapseAlarm:
    """Warns once when a drafter's acceptance collapses between two rollouts: it no longer predicts its policy.

    The difference of the two rates is tested against its standard error, sqrt(r (1 - r) (1 / n + 1 / m)), with r the
    rate of both together and n and m their numbers of verified blocks. Blocks are the units, since one wrong token
    ends a draft: for a share of γ tokens the error is at most this, for first tokens exactly this. If a fall by half
    could not show, the rollout with more blocks remains the reference.

    Args:
        by_first_token: compare the acceptance of first draft tokens alone, independent of γ.
        share: of the earlier acceptance, below which it has collapsed. None: COLLAPSE.
        keeps_first: the reference is the first rollout, whose drafter was fresh; False: the one before.
    """

    def __init__(self, by_first_token: bool, share: float | None = None, keeps_first: bool = False) -> None:
        self._by_first_token, self._keeps_first = by_first_token, keeps_first
        self._share = COLLAPSE if share is None else share
        self._previous: RolloutRecord | None = None

    def add(self, record: RolloutRecord) -> None:
        """Compares a training rollout with the reference, and warns if acceptance collapsed."""
        if not record.per_depth or record.drafter in LOOKUPS:
            return
        previous = self._previous
        if previous is None or previous.drafter != record.drafter:
            self._previous = record
            return
        name = "first_token_acceptance" if self._by_first_token else "acceptance_rate"
        (before, blocks), (now, others) = (
            (getattr(rollout, name) or 0.0, sum(depth.blocks for depth in rollout.per_depth.values()))
            for rollout in (previous, record)
        )
        pooled = (blocks * before + others * now) / (blocks + others)
        error = math.sqrt(pooled * (1 - pooled) * (1 / blocks + 1 / others))
        shows = (1 - self._share) * before > COLLAPSE_ERRORS * error
        if not self._keeps_first and (shows or others >= blocks or before < COLLAPSE_FROM):  # else too few: the
            self._previous = record  # earlier rollout says more
        if before >= COLLAPSE_FROM and now < self._share * before and before - now > COLLAPSE_ERRORS * error:
            warnings.warn(
                f"the acceptance rate of the drafter {record.drafter!r} fell from {before:.2f} to {now:.2f} between "
                f"two rollouts (step {record.step}). Outputs are not affected, speed is. Did something write weights "
                "that the drafter cannot see, or did the policy collapse?",
                stacklevel=2,
            )
