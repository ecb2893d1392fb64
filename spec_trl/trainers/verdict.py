"""Whether speculation helped a run's training rollouts: one sentence, from the run log. Calibration, and making,
refreshing and training the drafter are subtracted from the gain."""

from dataclasses import dataclass, field

from ..generation.engine.statistics import added
from .run_log import Record, RolloutRecord, Run, RunHeader, StepRecord


NOTABLE = 0.05
"""Seconds: less prints as 0.0."""
MORE = "Drafts pay with larger weights, fewer rows at a time, or texts that repeat."


@dataclass
class Verdict:
    """Sums over a run so far.

    Args:
        rollouts: number of training rollouts.
        compared: number of them that say what plain decoding would have taken.
        seconds: of the compared rollouts, making and refreshing the drafter included.
        plain_seconds: what plain decoding would have taken for them.
        calibration_seconds, adaptation_seconds: spent outside of rollouts.
        rounds, drafted_rounds: of all training rollouts.
        rounds_of: those in which each strategy drafted, alone or with another.
        plain_rounds: rounds that were timed without drafts.
        reason: of the newest rollout; None: the log is older than this field.
    """

    rollouts: int = 0
    compared: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    calibration_seconds: float = 0.0
    adaptation_seconds: float = 0.0
    rounds: int = 0
    drafted_rounds: float = 0.0
    rounds_of: dict[str, float] = field(default_factory=dict)
    plain_rounds: int = 0
    reason: str | None = None

    def add(self, record: Record) -> None:
        """Counts one more record of the run."""
        if isinstance(record, RunHeader):
            self.calibration_seconds += record.calibration_seconds
        elif not isinstance(record, RolloutRecord):
            self.adaptation_seconds += record.phases.get("adaptation", 0.0)
        elif record.mode == "train":
            self.rollouts += 1
            self.rounds += record.rounds
            self.drafted_rounds += record.rounds * (record.sd_on_fraction or 0.0)
            own = {name: record.rounds * share for name, share in record.drafted_by.items() if share}
            self.rounds_of = added(self.rounds_of, own)
            self.plain_rounds += sum(point.rounds for point in record.points if not point.draft_length)
            self.reason = record.reason
            if record.plain_seconds is not None:
                self.compared += 1
                self.seconds += record.seconds
                self.plain_seconds += record.plain_seconds

    @property
    def spent(self) -> float:
        """Seconds of the compared rollouts, and what drafting cost outside of them."""
        return self.seconds + self.calibration_seconds + self.adaptation_seconds

    @property
    def saved(self) -> float:
        """Seconds; less than 0: lost."""
        return self.plain_seconds - self.spent

    def __str__(self) -> str:
        if not self.rollouts:
            return "no training rollout was logged."
        costs = f"calibration{', adaptation' if self.adaptation_seconds else ''} and refresh"
        if not self.drafted_rounds:
            why = "" if self.reason is None else f" ({self.reason})"
            extra = f"; {costs} took {_text(-self.saved)}" if -self.saved >= NOTABLE else ""
            return f"nothing was drafted{why}: rollouts were plain decoding{extra}. {MORE}"
        share = f"drafting in {self.drafted_rounds / self.rounds:.0%} of rounds"
        if len(self.rounds_of) > 1:
            each = sorted(self.rounds_of.items(), key=lambda item: -item[1])
            share += f" ({', '.join(f'{name} in {rounds / self.rounds:.0%}' for name, rounds in each)})"
        if not self.compared:
            why = "the log is older than this comparison" if self.reason is None else "no plain round was measured"
            return f"{share}; the speedup over plain decoding is not known: {why}."
        baseline = "" if self.plain_rounds else " as predicted (no round of the run was plain)"
        gain = f"{_text(abs(self.saved))} {'saved' if self.saved >= 0 else 'lost'} ({costs} subtracted)"
        known = f"; known of {self.compared} of {self.rollouts} rollouts" if self.compared < self.rollouts else ""
        return f"rollouts {self.plain_seconds / self.spent:.2f}× of plain decoding{baseline}, {gain}, {share}{known}."


def verdict_of(run: Run) -> tuple[Verdict, list[float]]:
    """The verdict on a run, and the seconds saved until after each training rollout and the steps that follow it."""
    verdict, saved = Verdict(), list[float]()
    for header in run.headers:
        verdict.add(header)
    # A rollout's `step` counts the steps before it.
    records: list[RolloutRecord | StepRecord] = [*run.steps, *run.of("train")]
    for record in sorted(records, key=lambda record: record.step):  # which leaves steps before rollouts
        verdict.add(record)
        if isinstance(record, RolloutRecord):
            saved.append(verdict.saved)
        elif saved:
            saved[-1] = verdict.saved
    return verdict, saved


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"
