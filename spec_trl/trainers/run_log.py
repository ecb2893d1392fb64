"""The log of one training run: what each rollout and each step did, one JSON object per line.

`SpecGRPOTrainer` appends to it as it goes, so a killed run keeps all but its last line; ``spec-trl report`` draws it.
A resumed run appends a second header to the same file, and its records replace those that the first attempt had
written beyond the checkpoint. Neither torch nor transformers is needed to read it.
"""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from tqdm import tqdm

from ..generation.engine.timeline import RequestTimeline


LOG_FILE = "rollout_log.jsonl"
VERSION = 1
TIMELINES = 64
"""Requests of a rollout whose timelines are logged."""


@dataclass(frozen=True)
class DepthCounts:
    """Draft counts of the blocks that started in one bin of output depth (`generation.statistics.DEPTH_EDGES`)."""

    blocks: int
    committed: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class RoundPoint:
    """Decoding rounds of one rollout with the same batch, draft length and bin of cached length.

    Args:
        batch: active rows.
        length: mean cached tokens per row.
        draft_length: γ; 0 is autoregressive decoding.
        rounds: how many rounds.
        seconds: mean seconds of one of them.
        tokens: tokens that all of them committed, over all rows.
        drafter: the strategy that drafted; None: none did.
    """

    batch: int
    length: float
    draft_length: int
    rounds: int
    seconds: float
    tokens: int
    drafter: str | None = None


@dataclass(frozen=True)
class RunHeader:
    """Where and how a run, or the resumed part of one, was started.

    Args:
        started: ISO date and time.
        hardware: device name, and threads on a CPU.
        model: name or path of the policy.
        dtype: of the policy's forwards.
        strategy: `assistant_strategy`.
        settings: the configuration's own fields, JSON values.
        profile: path of the roofline profile, if there is one.
        calibration_seconds: spent before the first rollout on finding or measuring the profile and the draft ladder.
        version: of this format.
    """

    started: str
    hardware: str
    model: str
    dtype: str
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None
    calibration_seconds: float = 0.0
    version: int = VERSION


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout. Ratios and predictions are None where nothing was drafted or nothing was known.

    Args:
        mode: "train" or "eval".
        rollout: counts the rollouts of its mode from 0.
        step: optimizer steps done before it.
        strategy: what was asked for.
        drafter: what drafted; None: nothing did.
        seconds: of the whole rollout, `refresh_seconds` included; the slowest rank.
        refresh_seconds: making or requantizing the drafter.
        tokens, requests: generated, over all ranks.
        phase_seconds: "prefill", "noise", "draft", "verify", "accept", "compact", "control"; "learn" where a drafter
            learns while it drafts.
        block_efficiency: τ, tokens per verified block, bonus included.
        acceptance_rate: accepted over drafted tokens.
        first_token_acceptance: share of blocks whose first draft token was accepted.
        target_entropy: nats.
        draft_length: γ in force.
        mean_draft_length: mean γ of the rounds that speculated.
        sd_on_fraction: share of rounds that speculated.
        predicted_speedup, measured_speedup: of the speculative rounds over autoregressive ones (ER Eq. 1). Where
            nothing was drafted, the largest speedup that was predicted.
        rounds: decoding rounds.
        speculating: for each change, (round, γ); 0 is autoregressive decoding.
        completion_curve: (seconds since the start, requests finished so far), rank 0.
        per_depth: by lower edge of the depth bin in tokens.
        points: measured round times.
        timeline: who drafted for the requests of rank 0 that ended last, `TIMELINES` at most, in the order of ends.
        reason: why rows drafted or did not, rank 0; None: the log is older than this field.
        plain_seconds: what plain decoding of the same tokens would have taken, the slowest rank; None: not known.
    """

    mode: str
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
    speculating: list[tuple[int, int]] = field(default_factory=list)
    completion_curve: list[tuple[float, int]] = field(default_factory=list)
    per_depth: dict[int, DepthCounts] = field(default_factory=dict)
    points: list[RoundPoint] = field(default_factory=list)
    timeline: list[RequestTimeline] = field(default_factory=list)
    reason: str | None = None
    plain_seconds: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Args:
        step: counts from 1.
        seconds: of the whole step.
        phases: seconds of "rollout", "reward", "logprobs", "adaptation", "update", "other".
        reward: mean reward, if there was one.
    """

    step: int
    seconds: float
    phases: dict[str, float]
    reward: float | None


Record = RunHeader | RolloutRecord | StepRecord

_KINDS: dict[str, type[Record]] = {"header": RunHeader, "rollout": RolloutRecord, "step": StepRecord}


@dataclass(frozen=True)
class Run:
    """A whole log: headers in order of writing, records in order of rollout and of step, replaced ones left out."""

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
        path: of the file; its folder is made if missing. A last line that a killed run left unfinished is removed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _remove_partial_line(self.path)

    def append(self, record: Record) -> None:
        """Writes one line and closes the file again. NaN and infinity become null."""
        kind = next(name for name, kind in _KINDS.items() if isinstance(record, kind))
        line = json.dumps({"kind": kind} | _finite(asdict(record)), allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_run(path: Path | str) -> Run:
    """Reads the log of a run.

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
            f"{path} does not exist. Name the output_dir of a SpecGRPOTrainer run; it holds a {LOG_FILE}."
        )
    headers: list[RunHeader] = []
    rollouts: dict[tuple[str, int], RolloutRecord] = {}
    steps: dict[int, StepRecord] = {}
    started: set[str] = set()  # modes, and "step", that have records behind the newest header
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(tqdm(lines, desc=f"reading {path.name}", unit=" lines", delay=2, leave=False), 1):
        where = f"{path}: line {number}"
        try:
            data = json.loads(line)
        except ValueError:
            if line.endswith(b"\n"):
                raise ValueError(f"{where} is not JSON. Remove the line, or restore the file.") from None
            warnings.warn(f"{where} is incomplete and left out: the run was interrupted.", stacklevel=2)
            break
        record = _record(data, where)
        if isinstance(record, RunHeader):
            headers.append(record)
            started.clear()
        elif not headers:
            raise ValueError(f"{where} comes before any header. Is the beginning of the file missing?")
        elif isinstance(record, StepRecord):
            if "step" not in started:  # resumed: what the earlier attempt did from here on is void
                steps = {step: old for step, old in steps.items() if step < record.step}
                started.add("step")
            steps[record.step] = record
        else:
            mode, count = record.mode, record.rollout
            if mode not in started:
                rollouts = {key: old for key, old in rollouts.items() if key[0] != mode or key[1] < count}
                started.add(mode)
            rollouts[mode, count] = record
    if not headers:
        raise ValueError(f"{path} holds no record. The run ended before its first rollout; start it again.")
    return Run(path, headers, [rollouts[key] for key in sorted(rollouts)], [steps[step] for step in sorted(steps)])


def _remove_partial_line(path: Path) -> None:
    """Cuts the file behind its last complete line, so that what is appended starts on a line of its own."""
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete == len(data):
        return
    try:
        json.loads(data[complete:])
    except ValueError:
        with path.open("r+b") as file:
            file.truncate(complete)
    else:  # only the line break is missing
        with path.open("ab") as file:
            file.write(b"\n")


def _finite(value: Any) -> Any:
    """`value` with NaN and infinity, which JSON does not have, as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _record(data: Any, where: str) -> Record:
    """The record in one line's JSON value; ValueError, beginning with `where`, if it is not one."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f'{where} has no "kind" of {list(_KINDS)}. Remove the line, or restore the file.')
    if kind == "header" and data.get("version") != VERSION:
        raise ValueError(f"{where} has version={data.get('version')!r}. This spec_trl reads version {VERSION}.")
    record: Record = _typed({k: v for k, v in data.items() if k != "kind"}, _KINDS[kind], where)
    if isinstance(record, RolloutRecord) and record.mode not in ("train", "eval"):
        raise ValueError(f"{where} has mode={record.mode!r}. It must be 'train' or 'eval'.")
    return record


def _typed(value: Any, kind: Any, where: str) -> Any:
    """`value`, as JSON gives it, as the annotated type `kind`."""
    outer, inner = get_origin(kind), get_args(kind)
    if outer is UnionType:  # X | None
        return None if value is None else _typed(value, inner[0], where)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        # A log may be older than fields with a default are.
        missing = sorted(_required(kind) - value.keys())
        unknown = sorted(value.keys() - hints.keys())
        if missing or unknown:
            what = f"lacks {missing}" if missing else f"has unknown {unknown}"
            raise ValueError(f"{where} {what}. It was edited, or written by another version of spec_trl.")
        where = where.removesuffix(":")
        return kind(**{name: _typed(entry, hints[name], f"{where}, {name}:") for name, entry in value.items()})
    if outer is list and isinstance(value, list):
        return [_typed(entry, inner[0], where) for entry in value]
    if outer is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(_typed(entry, hint, where) for entry, hint in zip(value, inner, strict=True))
    if outer is dict and isinstance(value, dict):
        keys = {key: int(key) if inner[0] is int and key.isdecimal() else key for key in value}  # JSON keys are text
        return {_typed(keys[key], inner[0], where): _typed(entry, inner[1], where) for key, entry in value.items()}
    if kind is Any:
        return value
    if outer is None and not is_dataclass(kind) and not isinstance(value, bool):
        if kind is float and isinstance(value, int):
            return float(value)
        if isinstance(value, kind):
            return value
    wanted = f"a list of {len(inner)}" if outer is tuple else _NAMES.get(outer or kind, "an object")
    raise ValueError(f"{where} has {str(value):.60} where {wanted} belongs.")


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


@cache
def _required(kind: type) -> frozenset[str]:
    """Names of the fields without a default."""
    return frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


_NAMES: dict[Any, str] = {str: "text", int: "an integer", float: "a number", list: "a list"}
