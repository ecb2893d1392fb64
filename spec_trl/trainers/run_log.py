"""Writes and reads the log of a training run: a JSON object per rollout and step.

A resumed run appends a second header to the same file. Its records replace those of the first attempt after the
checkpoint. Reading a log needs neither torch nor transformers.
"""

import json
import math
import os
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Discriminator
from tqdm import tqdm

from ..generation.engine.statistics import DraftCounts, PlanChange, RequestTimeline, RoundPoint
from ..json_files import from_json, to_json


LOG_FILE = "rollout_log.jsonl"
TIMELINES = 64
"""Requests of a rollout whose timelines are logged."""

Mode = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """Describes the start of a run, or of its resumed part.

    Args:
        version: of the format. In version 1, and in logs without a version, `seconds` of a `RoundPoint` is the mean of
            its rounds; they are read as their sum.
        started: ISO date and time.
        model: name or path of the policy.
        settings: options of the trainer's config that TRL's config lacks.
        profile: path of the roofline profile, if there is one.
        calibration_seconds: spent before the first rollout on a profile and a draft ladder, or else on a probe of the
            machine.
        not_compared: why the sampler's log-probabilities are not compared with the loss's; None: they are, or the
            trainer is none of ours.
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
    not_compared: str | None = None


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
        drafter: the strategy that drafted in most rounds; None: none drafted.
        seconds: of the whole rollout, `refresh_seconds` (requantizing the drafter) and `setup_seconds` included.
        setup_seconds: of making drafters and of the calls' setup; most of it comes once.
        requests: number of completions.
        target_entropy: mean of -log p of the sampled tokens, in nats.
        draft_length: γ in force.
        mean_draft_length, sd_on_fraction: of the rounds that speculated, the mean γ, and their share of all.
        timeline: of the last `TIMELINES` requests to end, in the order of their ends.
        plain_seconds: estimate for plain decoding, without setup; None: unknown.
        tail_seconds, tail_rounds: after half of a call's requests had ended.
        drafted_by, race_wins: by strategy: share of rounds in which it drafted, number of chains that won
            over another of their row.
        rank_seconds: seconds of decoding by rank; in a pool, waiting for other ranks is left out.
        moved_rows: number of rows that moved from rank to rank.
        drafter_updates: of a drafter that learns while it drafts; None: none learns.
        drafter_update_seconds: time that decoding waited for these updates.
        not_exact: values of `exact` of its calls, as texts, but for True.
    """

    kind: Literal["rollout"] = "rollout"
    mode: Mode
    rollout: int
    step: int
    strategy: str
    drafter: str | None
    seconds: float
    refresh_seconds: float
    setup_seconds: float = 0.0
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
    not_exact: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Over plain decoding, refresh included, without setup; NaN: unknown."""
        seconds = self.seconds - self.setup_seconds
        return self.plain_seconds / seconds if self.plain_seconds and seconds else math.nan

    @property
    def idle_share(self) -> float | None:
        """Share of the ranks' time without rows to decode; None: not logged."""
        return 1 - fmean(self.rank_seconds) / (self.seconds - self.setup_seconds) if self.rank_seconds else None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Args:
        step: counts from 1.
        phases: seconds of "rollout", "reward", "logprobs", "adaptation", "update", "other".
        reward: mean reward, if there was one.
        sampler_distance: largest distance of the sampler's log-probabilities from the loss's, in nats, over all ranks
            and micro-batches; None: no token was compared.
        compared: number of these tokens.
    """

    kind: Literal["step"] = field(default="step", kw_only=True)
    step: int
    seconds: float
    phases: dict[str, float]
    reward: float | None
    sampler_distance: float | None = None
    compared: int = 0


@dataclass(frozen=True)
class PlainCall:
    """A call of `generate` that ran plain, with the `reason`."""

    kind: Literal["plain_call"] = field(default="plain_call", kw_only=True)
    reason: str


Record = RunHeader | RolloutRecord | StepRecord | PlainCall
_LINE: Any = Annotated[Record, Discriminator("kind")]


@dataclass(frozen=True)
class Run:
    """A whole log: headers and plain calls in order of writing, records in order of rollout and of step, without
    replaced ones."""

    path: Path
    headers: list[RunHeader]
    rollouts: list[RolloutRecord]
    steps: list[StepRecord]
    plain_calls: list[PlainCall] = field(default_factory=list)

    @property
    def header(self) -> RunHeader:
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
    """Reads the log of a run. An unfinished last line is left out, with a warning.

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
    plain_calls: list[PlainCall] = []
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
        elif isinstance(record, PlainCall):
            plain_calls.append(record)
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
    return Run(path, headers, eval_ + train, steps, plain_calls)
