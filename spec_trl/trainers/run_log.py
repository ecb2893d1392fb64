"""The log of a training run, a JSON object per rollout and step, and the verdict on it: whether speculation helped.

A resumed run appends a second header to the same file. Its records replace those that the first attempt wrote after
the checkpoint. Reading a log needs neither torch nor transformers.
"""

import json
import os
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Discriminator
from tqdm import tqdm

from ..generation.engine.statistics import DraftCounts, PlanChange, RequestTimeline, RoundPoint, added
from ..json_files import from_json, to_json


LOG_FILE = "rollout_log.jsonl"
TIMELINES = 64
"""Requests of a rollout whose timelines are logged."""
NOTABLE = 0.05
"""Seconds; a smaller value would print as 0.0."""
MORE = "Drafts pay with larger weights, fewer rows at a time, or texts that repeat."
COLLAPSE, COLLAPSE_FROM = 0.5, 0.3
"""Acceptance collapses when it falls below the share COLLAPSE of a rate of COLLAPSE_FROM or more."""
COLLAPSE_DRAFTED = 64
"""Rollouts with fewer draft tokens are not compared: a toggle stops a bad drafter early."""
LOOKUPS = ("history", "ngram")
"""Drafters that are not compared: their acceptance depends on the texts, and no weights could go stale."""

Mode = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """Describes the start of a run, or of its resumed part.

    Args:
        version: of the format. In version 1, and in logs without a version, `seconds` of a `RoundPoint` is the mean of
            its rounds; they are read as their sum.
        started: ISO date and time.
        model: name or path of the policy.
        strategy: `assistant_strategy`.
        settings: options of the trainer's config that TRL's config lacks.
        profile: path of the roofline profile, if there is one.
        calibration_seconds: spent before the first rollout on the profile and the draft ladder.
    """

    kind: Literal["header"] = "header"
    version: Literal[1, 2] = 2
    started: str
    hardware: str
    model: str
    dtype: str
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    calibration_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One rollout: all its `generate` calls and ranks together.

    Fields with a name of `SpeculationStatistics` are explained there. Counts are sums over ranks; `…seconds` and
    `tail_rounds` are the slowest rank's; `rounds`, `phase_seconds`, `speculating`, `completion_curve`, `points`,
    `timeline` and `reason` are rank 0's. Ratios are None where nothing was drafted. Fields with a default are missing
    in older logs.

    Args:
        rollout: number of rollouts of its mode before it.
        step: number of optimizer steps before it.
        strategy: `assistant_strategy`.
        drafter: the strategy that drafted in most rounds; None: none drafted.
        seconds: of the whole rollout, `refresh_seconds` (making or requantizing the drafter) included.
        requests: number of completions.
        target_entropy: mean of -log p of the sampled tokens, in nats.
        draft_length: γ in force.
        mean_draft_length, sd_on_fraction: of the rounds that speculated, the mean γ, and their share of all.
        timeline: of the last `TIMELINES` requests to end, in the order of their ends.
        plain_seconds: estimate for plain decoding; None: unknown.
        tail_seconds, tail_rounds: after half of a call's requests had ended.
        drafted_by, race_wins: by strategy: share of rounds in which it drafted, number of races won.
        rank_seconds: seconds of decoding by rank; in a pool, waiting for other ranks is left out.
        moved_rows: number of rows that moved from rank to rank.
        drafter_updates: of a drafter that learns while it drafts; None: none learns.
        drafter_update_seconds: time in which decoding waited for these updates.
    """

    kind: Literal["rollout"] = "rollout"
    mode: Mode
    rollout: int
    step: int
    strategy: str
    drafter: str | None
    seconds: float
    refresh_seconds: float
    tokens: int
    requests: int
    phase_seconds: dict[str, float]
    block_efficiency: float | None
    acceptance_rate: float | None
    first_token_acceptance: float | None
    target_entropy: float | None
    draft_length: int
    mean_draft_length: float | None
    sd_on_fraction: float | None
    predicted_speedup: float | None
    measured_speedup: float | None
    rounds: int
    speculating: list[PlanChange] = field(default_factory=list)
    completion_curve: list[tuple[float, int]] = field(default_factory=list)
    per_depth: dict[int, DraftCounts] = field(default_factory=dict)
    points: list[RoundPoint] = field(default_factory=list)
    timeline: list[RequestTimeline] = field(default_factory=list)
    reason: str | None = None
    plain_seconds: float | None = None
    tail_seconds: float = 0.0
    tail_rounds: int = 0
    drafted_by: dict[str, float] = field(default_factory=dict)
    race_wins: dict[str, int] = field(default_factory=dict)
    drafter_updates: int | None = None
    drafter_update_seconds: float = 0.0
    rank_seconds: list[float] = field(default_factory=list)
    moved_rows: int = 0

    @property
    def idle_share(self) -> float | None:
        """Share of the ranks' time without rows to decode; None: not logged."""
        return 1 - fmean(self.rank_seconds) / self.seconds if self.rank_seconds else None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Args:
        step: counts from 1.
        phases: seconds of "rollout", "reward", "logprobs", "adaptation", "update", "other".
        reward: mean reward, if there was one.
    """

    kind: Literal["step"] = field(default="step", kw_only=True)
    step: int
    seconds: float
    phases: dict[str, float]
    reward: float | None


Record = RunHeader | RolloutRecord | StepRecord
_LINE: Any = Annotated[Record, Discriminator("kind")]


@dataclass(frozen=True)
class Run:
    """A whole log: headers in order of writing, records in order of rollout and of step, without replaced ones."""

    path: Path
    headers: list[RunHeader]
    rollouts: list[RolloutRecord]
    steps: list[StepRecord]

    @property
    def header(self) -> RunHeader:
        """The newest header."""
        return self.headers[-1]

    def of(self, mode: str) -> list[RolloutRecord]:
        """The rollouts of "train" or of "eval"."""
        return [record for record in self.rollouts if record.mode == mode]


class RunLog:
    """Appends records to a log file. Only one process (rank 0) may write it.

    Args:
        path: of the file; its folder is made if missing. An unfinished last line of a killed run is removed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        complete, end, rest = self.path.read_bytes().rpartition(b"\n")
        if not rest:
            return
        with self.path.open("r+b") as file:  # in place: the file may be a link
            try:
                json.loads(rest)
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            except ValueError:
                file.truncate(len(complete + end))

    def append(self, record: Record) -> None:
        """Writes one line and closes the file again. NaN and infinity become null."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")


def read_run(path: Path | str) -> Run:
    """Reads the log of a run. An unfinished last line is left out with a warning.

    Args:
        path: the log file, or the output folder that holds it as `rollout_log.jsonl`.

    Raises:
        ValueError: there is no such file, it holds no header, or a line other than an unfinished last one is broken;
            names the file and the line.
    """
    path = Path(path)
    path = path / LOG_FILE if path.is_dir() else path
    if not path.exists():
        raise ValueError(
            f"{path} does not exist. Name the output_dir of a run with speculative rollouts; it holds a {LOG_FILE}."
        )
    headers: list[RunHeader] = []
    records: dict[str, dict[int, Any]] = {"eval": {}, "train": {}, "step": {}}  # by mode or "step", and by number
    started: set[str] = set()  # keys with records after the newest header
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(tqdm(lines, desc=f"reading {path.name}", unit=" lines", delay=2, leave=False), 1):
        where = f"{path}: line {number}"
        try:
            record: Record = from_json(line, _LINE)
        except ValueError as error:
            if line.endswith(b"\n"):
                raise ValueError(f"{where}: {error}. Remove the line, or restore the file.") from None
            warnings.warn(f"{where} is incomplete and left out: the run was interrupted ({error}).", stacklevel=2)
            break
        if isinstance(record, RunHeader):
            headers.append(record if "version" in json.loads(line) else replace(record, version=1))
            started.clear()
        elif not headers:
            raise ValueError(f"{where} comes before any header. Is the beginning of the file missing?")
        else:
            if isinstance(record, RolloutRecord) and headers[-1].version == 1:
                for point in record.points:
                    point.seconds *= point.rounds
            kind, at = ("step", record.step) if isinstance(record, StepRecord) else (record.mode, record.rollout)
            if kind not in started:  # resumed: later records of the earlier attempt do not count
                records[kind] = {place: old for place, old in records[kind].items() if place < at}
                started.add(kind)
            records[kind][at] = record
    if not headers:
        raise ValueError(f"{path} holds no record. The run ended before its first rollout; start it again.")
    eval_, train, steps = ([by_number[at] for at in sorted(by_number)] for by_number in records.values())
    return Run(path, headers, eval_ + train, steps)


# ---- what a log says ------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """Sums over a run so far. Its text says in one sentence whether speculation helped the training rollouts.
    Calibration, and making, refreshing and training the drafter, are subtracted from the gain.

    Args:
        rollouts: number of training rollouts.
        compared: number of rollouts with known `plain_seconds`.
        seconds: of the compared rollouts, making and refreshing the drafter included.
        plain_seconds: predicted seconds of plain decoding for the compared rollouts.
        calibration_seconds, adaptation_seconds: spent outside of rollouts.
        rounds, drafted_rounds: of all training rollouts.
        rounds_of: rounds in which a strategy drafted, alone or with another.
        plain_rounds: timed rounds without drafts.
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
            drafted = {name: record.rounds * share for name, share in record.drafted_by.items() if share}
            self.rounds_of = added(self.rounds_of, drafted)
            self.plain_rounds += sum(point.rounds for point in record.points if not point.draft_length)
            self.reason = record.reason
            if record.plain_seconds is not None:
                self.compared += 1
                self.seconds += record.seconds
                self.plain_seconds += record.plain_seconds

    @property
    def spent(self) -> float:
        """Seconds of the compared rollouts, and of drafters' costs outside of them."""
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
            extra = f"; {costs} took {_seconds(-self.saved)}" if -self.saved >= NOTABLE else ""
            return f"nothing was drafted{why}: rollouts were plain decoding{extra}. {MORE}"
        share = f"drafting in {self.drafted_rounds / self.rounds:.0%} of rounds"
        if len(self.rounds_of) > 1:
            by_rounds = sorted(self.rounds_of.items(), key=lambda item: -item[1])
            share += f" ({', '.join(f'{name} in {rounds / self.rounds:.0%}' for name, rounds in by_rounds)})"
        if not self.compared:
            why = "the log is older than this comparison" if self.reason is None else "no plain round was measured"
            return f"{share}; the speedup over plain decoding is not known: {why}."
        baseline = "" if self.plain_rounds else " as predicted (no round of the run was plain)"
        gain = f"{_seconds(abs(self.saved))} {'saved' if self.saved >= 0 else 'lost'} ({costs} subtracted)"
        known = f"; known of {self.compared} of {self.rollouts} rollouts" if self.compared < self.rollouts else ""
        return f"rollouts {self.plain_seconds / self.spent:.2f}× of plain decoding{baseline}, {gain}, {share}{known}."


def verdict_of(run: Run) -> tuple[Verdict, list[float]]:
    """The verdict on a run, and the seconds saved up to each training rollout and the steps that follow it."""
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


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


class CollapseAlarm:
    """Warns once when a drafter's acceptance collapses between two rollouts: it no longer predicts its policy.

    Args:
        by_first_token: compare the acceptance of first draft tokens alone, which does not depend on γ.
    """

    def __init__(self, by_first_token: bool) -> None:
        self._by_first_token = by_first_token
        self._previous: RolloutRecord | None = None

    def add(self, record: RolloutRecord) -> None:
        """Compares a training rollout with the one before, and warns if acceptance collapsed."""
        drafted = sum(depth.drafted for depth in record.per_depth.values())
        if drafted < COLLAPSE_DRAFTED or record.drafter in LOOKUPS:
            return
        previous, self._previous = self._previous, record
        if previous is None or previous.drafter != record.drafter:
            return
        name = "first_token_acceptance" if self._by_first_token else "acceptance_rate"
        before, now = (getattr(rollout, name) or 0.0 for rollout in (previous, record))
        if before >= COLLAPSE_FROM and now < COLLAPSE * before:
            warnings.warn(
                f"the acceptance rate of the drafter {record.drafter!r} fell from {before:.2f} to {now:.2f} between "
                f"two rollouts (step {record.step}). Outputs are not affected, speed is. Did something write weights "
                "that the drafter cannot see, or did the policy collapse?",
                stacklevel=2,
            )
