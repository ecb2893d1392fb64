"""Measured forward times over batch size, cached length and draft length, and the CSV files that hold them."""

import csv
import math
import statistics
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, cast

from .roofline import require_number


Mode = Literal["target", "draft", "verify"]
COLUMNS = ("model", "batch", "length", "draft_length", "mode", "seconds")
PUBLISHED_COLUMNS = ("model", "batch", "seq", "gamma", "mode", "median_ms")
_MODES: dict[str, Mode] = {"target": "target", "draft": "draft", "verify": "verify"}
# Their fourth mode, target_decode_sd, times the target a second time.
_PUBLISHED_MODES: dict[str, Mode] = {"target_decode": "target", "drafter_decode": "draft", "target_verify": "verify"}
_IGNORED_MODE = "target_decode_sd"
INCLUDED_DRAFT_SHARE = 0.7
"""Published verify times that exceed the target's by at least this share of γ·T_D contain the draft."""
TOLERATED_GAPS = 0.1
"""Share of (B, S, γ) that may lack one of its times: sweeps lose a point or two to memory or to a time limit."""


@dataclass(frozen=True)
class Sample:
    """One measured time.

    Args:
        batch: rows.
        length: cached tokens per row.
        draft_length: γ; 0 for the target. A draft sample of 0 was timed once and stands for every γ.
        mode: "target" and "draft": one forward of one token per row. "verify": a target forward of γ + 1.
        seconds: of that forward.
    """

    batch: int
    length: float
    draft_length: int
    mode: Mode
    seconds: float

    def __post_init__(self) -> None:
        require_number(self, "batch", above=0)
        require_number(self, "length")
        require_number(self, "draft_length")
        require_number(self, "seconds", above=0)
        if self.mode not in list(_MODES):
            raise ValueError(f"mode={self.mode!r} is unknown; choose one of {list(_MODES)}.")
        if self.mode == "verify" and self.draft_length == 0:
            raise ValueError("draft_length=0 of a verify sample is out of range; it must be at least 1.")


class Point(NamedTuple):
    """One (B, S, γ) with its three measured times in seconds."""

    batch: int
    length: float
    draft_length: int
    target: float
    draft: float
    verify: float

    @property
    def cycle(self) -> float:
        """γ T_D + T_V, seconds."""
        return self.draft_length * self.draft + self.verify


def points(samples: Iterable[Sample]) -> list[Point]:
    """Every (B, S, γ) of which all three times were measured, in ascending order."""
    times = {(s.mode, s.batch, s.length, s.draft_length): s.seconds for s in samples}
    found = []
    for mode, batch, length, draft_length in sorted(times):
        if mode != "verify":
            continue
        target = times.get(("target", batch, length, 0))
        draft = times.get(("draft", batch, length, draft_length), times.get(("draft", batch, length, 0)))
        if target is not None and draft is not None:
            verify = times["verify", batch, length, draft_length]
            found.append(Point(batch, length, draft_length, target, draft, verify))
    return found


def check_samples(samples: Iterable[Sample], source: str) -> str | None:
    """Raises ValueError naming `source` when a fit of `samples` would not be possible or honest.

    Up to a tenth of the (B, S, γ) may lack their draft or verify time; what is returned then names them.
    """
    cells: dict[Mode, set[tuple[int, float, int]]] = {"target": set(), "draft": set(), "verify": set()}
    for sample in samples:
        cells[sample.mode].add((sample.batch, sample.length, sample.draft_length))
    for mode, found in cells.items():
        if not found:
            raise ValueError(f"{source} has no {mode} row; sweep target, draft and verify forwards.")
    targets = {(batch, length) for batch, length, _ in cells["target"]}
    modes: tuple[Mode, ...] = ("draft", "verify")
    for mode in modes:
        for batch, length, _ in sorted(cells[mode]):
            if (batch, length) not in targets:
                raise ValueError(
                    f"{source} has a {mode} row but no target row for batch={batch}, length={length:g}; "
                    "measure the target there or remove the row."
                )
    shared_drafts = {(batch, length) for batch, length, draft_length in cells["draft"] if draft_length == 0}
    drafts = {cell for cell in cells["draft"] if cell[2] > 0}
    drafts |= {cell for cell in cells["verify"] if cell[:2] in shared_drafts}
    # Beyond the rows that the drafter's kernels serve nothing is drafted by network, only verified.
    widest = max(batch for batch, _, _ in cells["draft"])
    verified = {cell for cell in cells["verify"] if cell[0] <= widest}
    gaps = sorted(drafts ^ verified)
    if not gaps:
        return None
    total = len(drafts | verified)
    shown = ", ".join(f"(batch={b}, length={s:g}, draft_length={g})" for b, s, g in gaps[:4])
    shown += ", ..." if len(gaps) > 4 else ""
    message = f"{source}: {len(gaps)} of {total} grid points lack a draft or verify row: {shown}"
    if len(gaps) > TOLERATED_GAPS * total:
        raise ValueError(f"{message}; measure them again.")
    return f"{message}; they are left out."


def read_sweep(path: str | Path) -> list[Sample]:
    """Reads a sweep of one model, in our format or in that of ER's published ones (`seq`, `median_ms`).

    Published verify times are corrected by γ·T_D where their timer had included the draft; rows of batch 0 are an
    aggregate and skipped. A few missing draft or verify rows are named in one warning.

    Raises:
        ValueError: a column is missing, a time is not a positive number, or rows are missing; see `check_samples`.
    """
    path = Path(path)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        published = "seq" in header
        required = PUBLISHED_COLUMNS if published else COLUMNS
        missing = [column for column in required if column not in header]
        if missing:
            raise ValueError(
                f"{path} lacks the columns {missing}; a sweep has {list(COLUMNS)} "
                f"or, as published with EfficientRollout, {list(PUBLISHED_COLUMNS)}."
            )
        parse = _parse_published if published else _parse
        samples: dict[tuple[int, float, int, Mode], Sample] = {}
        models = set()
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            sample = parse(row, place)
            if sample is None:
                continue
            models.add(row["model"])
            key = (sample.batch, sample.length, sample.draft_length, sample.mode)
            if key in samples:
                raise ValueError(f"{place}: a second {sample.mode} row for the same point; remove one of them.")
            samples[key] = sample
    if len(models) > 1:
        raise ValueError(f"{path} holds several models, {sorted(models)}; give each its own file.")
    found = list(samples.values())
    if gaps := check_samples(found, str(path)):
        warnings.warn(gaps, stacklevel=2)
    return _without_included_draft(found) if published else found


def write_sweep(path: str | Path, model: str, samples: Iterable[Sample]) -> None:
    """Writes `samples` of `model` in our format, which `read_sweep` reads."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for s in samples:
            writer.writerow([model, s.batch, f"{s.length:g}", s.draft_length, s.mode, repr(s.seconds)])


def _parse(row: Mapping[str, str | None], place: str) -> Sample:
    mode = row["mode"]
    if mode not in _MODES:
        raise ValueError(f"{place}, column mode: {mode!r} is unknown; choose one of {list(_MODES)}.")
    draft_length = int(_number(row, "draft_length", place, 0, integer=True))
    return _sample(row, place, "length", draft_length, _MODES[mode], _number(row, "seconds", place, None))


def _parse_published(row: Mapping[str, str | None], place: str) -> Sample | None:
    mode = row["mode"]
    if mode == _IGNORED_MODE or row["batch"] == "0":
        return None
    if mode not in _PUBLISHED_MODES:
        raise ValueError(
            f"{place}, column mode: {mode!r} is unknown; choose one of {[*_PUBLISHED_MODES, _IGNORED_MODE]}."
        )
    draft_length = int(_number(row, "gamma", place, 0, integer=True))
    seconds = _number(row, "median_ms", place, None) / 1e3
    return _sample(row, place, "seq", draft_length, _PUBLISHED_MODES[mode], seconds)


def _sample(
    row: Mapping[str, str | None], place: str, length: str, draft_length: int, mode: Mode, seconds: float
) -> Sample:
    if mode == "verify" and draft_length == 0:
        raise ValueError(f"{place}: a verify row of draft length 0; it must be at least 1.")
    return Sample(
        batch=int(_number(row, "batch", place, 1, integer=True)),
        length=_number(row, length, place, 0),
        draft_length=0 if mode == "target" else draft_length,
        mode=mode,
        seconds=seconds,
    )


def _number(row: Mapping[str, str | None], column: str, place: str, least: int | None, integer: bool = False) -> float:
    """The number in `column`: finite, at least `least`, or positive where that is None."""
    text = row[column]
    try:
        value = float(cast(str, text))
    except (TypeError, ValueError):
        raise ValueError(f"{place}, column {column}: {text!r} is not a number; measure the row again.") from None
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        bound = "positive" if least is None else f"at least {least}"
        raise ValueError(f"{place}, column {column}: {text} must be finite and {bound}; measure the row again.")
    if integer and value != int(value):
        raise ValueError(f"{place}, column {column}: {text} must be an integer.")
    return value


def _without_included_draft(samples: list[Sample]) -> list[Sample]:
    """Takes γ·T_D off the verify times where their median excess over the target shows that it is in them."""
    known = {(p.batch, p.length, p.draft_length): p for p in points(samples)}
    excess = [(p.verify - p.target) / (p.draft_length * p.draft) for p in known.values()]
    if statistics.median(excess) < INCLUDED_DRAFT_SHARE:
        return samples
    corrected = []
    for sample in samples:
        point = known.get((sample.batch, sample.length, sample.draft_length))
        if sample.mode != "verify":
            corrected.append(sample)
        elif point is not None:  # a verify row without its draft row cannot be corrected
            seconds = sample.seconds - point.draft_length * point.draft
            if seconds <= 0:
                raise ValueError(
                    f"the verify time at batch={point.batch}, length={point.length:g}, draft_length="
                    f"{point.draft_length} is not above the draft time it includes; measure the sweep again."
                )
            corrected.append(replace(sample, seconds=seconds))
    return corrected
