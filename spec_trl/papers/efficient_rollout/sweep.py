"""Reads and writes forward times over batch size, cached length and draft length as CSV files."""

import csv
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ...value_checks import require_field
from .roofline import Mode


MODES: tuple[Mode, ...] = get_args(Mode)
COLUMNS = ("model", "batch", "length", "draft_length", "mode", "seconds")
TOLERATED_GAPS = 0.1
"""Share of (B, S, γ) that may lack a time: sweeps lose a point or two to memory or to a time limit."""


@dataclass(frozen=True)
class Sample:
    """One measured time. Raises ValueError if a value is of the wrong type or out of range."""

    batch: int  # rows
    length: float  # cached tokens per row
    draft_length: int  # γ; 0 for the target. A draft sample of 0 was timed once and stands for every γ
    mode: Mode  # "target" and "draft": a forward of one token per row; "verify": a target forward of γ + 1
    seconds: float  # of that forward

    def __post_init__(self) -> None:
        for name, above in (("batch", 0), ("length", None), ("draft_length", None), ("seconds", 0)):
            require_field(self, name, above)
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; choose one of {list(MODES)}.")
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
    """Every (B, S, γ) with all three measured times, in ascending order."""
    times = {(s.mode, s.batch, s.length, s.draft_length): s.seconds for s in samples}
    found = []
    for mode, batch, length, draft_length in sorted(times):
        target = times.get(("target", batch, length, 0))
        draft = times.get(("draft", batch, length, draft_length), times.get(("draft", batch, length, 0)))
        if mode == "verify" and target is not None and draft is not None:
            found.append(Point(batch, length, draft_length, target, draft, times[mode, batch, length, draft_length]))
    return found


def check_samples(samples: Iterable[Sample], source: str) -> str | None:
    """Raises ValueError, naming `source`, unless `samples` can be fitted. Up to a tenth of the (B, S, γ) may lack
    their draft or verify time; the returned text names them."""
    cells: dict[Mode, set[tuple[int, float, int]]] = {mode: set() for mode in MODES}
    for sample in samples:
        cells[sample.mode].add((sample.batch, sample.length, sample.draft_length))
    for mode, found in cells.items():
        if not found:
            raise ValueError(f"{source} has no {mode} row; sweep target, draft and verify forwards.")
    targets = {cell[:2] for cell in cells["target"]}
    for mode in MODES[1:]:
        for batch, length, _ in sorted(cells[mode]):
            if (batch, length) not in targets:
                raise ValueError(
                    f"{source} has a {mode} row but no target row for batch={batch}, length={length:g}; "
                    "measure the target there or remove the row."
                )
    shared_drafts = {(batch, length) for batch, length, draft_length in cells["draft"] if draft_length == 0}
    drafts = {cell for cell in cells["draft"] if cell[2] > 0}
    drafts |= {cell for cell in cells["verify"] if cell[:2] in shared_drafts}
    # With more rows than the drafter's kernels serve, only verification was timed.
    widest = max(batch for batch, _, _ in cells["draft"])
    verified = {cell for cell in cells["verify"] if cell[0] <= widest}
    gaps = sorted(drafts ^ verified)
    if not gaps:
        return None
    total = len(drafts | verified)
    shown = ", ".join(f"(batch={b}, length={s:g}, draft_length={g})" for b, s, g in gaps[:4])
    message = f"{source}: {len(gaps)} of {total} grid points lack a draft or verify row: {shown}"
    message += ", ..." if len(gaps) > 4 else ""
    if len(gaps) > TOLERATED_GAPS * total:
        raise ValueError(f"{message}; measure them again.")
    return f"{message}; they are left out."


def read_sweep(path: str | Path) -> list[Sample]:
    """Reads a sweep of one model. A few missing draft or verify rows are named in one warning.

    Raises:
        ValueError: a column is missing, a row is bad, or rows are missing (`check_samples`).
    """
    path = Path(path)
    samples: dict[tuple[int, float, int, Mode], Sample] = {}
    models = set()
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or [])]:
            raise ValueError(f"{path} lacks the columns {missing}; a sweep has {list(COLUMNS)}.")
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            models.add(row["model"])
            try:
                sample = _parse(row)
            except ValueError as error:
                raise ValueError(f"{place}: {str(error).rstrip('.')}; measure the row again.") from None
            key = (sample.batch, sample.length, sample.draft_length, sample.mode)
            if key in samples:
                raise ValueError(f"{place}: a second {sample.mode} row for the same point; remove one of them.")
            samples[key] = sample
    if len(models) > 1:
        raise ValueError(f"{path} holds several models, {sorted(models)}; give each its own file.")
    found = list(samples.values())
    if gaps := check_samples(found, str(path)):
        warnings.warn(gaps, stacklevel=2)
    return found


def write_sweep(path: str | Path, model: str, samples: Iterable[Sample]) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for s in samples:
            writer.writerow([model, s.batch, f"{s.length:g}", s.draft_length, s.mode, repr(s.seconds)])


def _parse(row: Mapping[str, str | None]) -> Sample:
    def number(column: str) -> Any:
        try:
            value = float(row[column] or "")
        except ValueError:
            raise ValueError(f"{column}={row[column]!r} is not a number") from None
        return int(value) if column in ("batch", "draft_length") and value.is_integer() else value

    mode: Any = row["mode"]
    sample = Sample(number("batch"), number("length"), number("draft_length"), mode, number("seconds"))
    return replace(sample, draft_length=0) if mode == "target" else sample
