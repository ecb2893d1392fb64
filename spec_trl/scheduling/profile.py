"""A calibrated roofline as a JSON file: what it is valid for, the coefficients, and the times they were fitted to."""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..json_files import write_atomically
from .roofline import Coefficients, ModelConstants, Roofline
from .sweep import Sample


VERSION = 1
T = TypeVar("T")


class ProfileMismatch(ValueError):
    """A profile of other hardware, shape, precision, quantization or kernel than what runs."""


@dataclass(frozen=True)
class ProfileKey:
    """What a profile is valid for. A model's name is no part of it: two models of one shape share a profile.

    Args:
        hardware: device name; on a CPU with the number of threads.
        shape: fingerprint of the target's and the drafter's shape.
        dtype: of the target's weights.
        quantization: the drafter's.
        kernel: the drafter's.
        runner: how forwards run ("eager", or captured in one of the ways of `SpeculativeConfig.runner`).
    """

    hardware: str
    shape: str
    dtype: str
    quantization: str
    kernel: str
    runner: str = "eager"

    @property
    def file_name(self) -> str:
        """A readable file name that no other key has."""
        text = "_".join(dataclasses.astuple(self))
        readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", text)[:120].strip("-")
        return f"{readable}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


@dataclass(frozen=True)
class Profile:
    """One calibration.

    Args:
        key: what it is valid for.
        roofline: constants and fitted coefficients.
        draft_max_rows: beyond so many rows the drafter's kernel does not run; None: no limit.
        diagnostics: errors of the fit, as plain data.
        samples: the times it was fitted to, so that it can be plotted and refitted.
        created: ISO date.
    """

    key: ProfileKey
    roofline: Roofline
    draft_max_rows: int | None
    diagnostics: dict[str, Any]
    created: str
    samples: list[Sample] = field(default_factory=list)
    version: int = VERSION

    def save(self, path: str | Path) -> None:
        """Writes JSON to `path` in one step: a reader sees the old file or the new one, never half of it."""
        path = Path(path)
        content = {
            "version": self.version,
            "created": self.created,
            "key": dataclasses.asdict(self.key),
            "constants": dataclasses.asdict(self.roofline.constants),
            "coefficients": dataclasses.asdict(self.roofline.coefficients),
            "draft_max_rows": self.draft_max_rows,
            "diagnostics": self.diagnostics,
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }
        write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads what `save` wrote; the values may have been edited by hand and are checked.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is truncated, a field is missing, unknown, of the wrong type or out of range, or the version
                is another; the message names file, field and value.
        """
        remedy = "correct it, or delete the file and calibrate again"
        try:
            content = json.loads(Path(path).read_text(), parse_constant=_refuse_constant)
            return _profile(content)
        except ValueError as error:  # JSONDecodeError is one
            raise ValueError(f"{path} is not a valid roofline profile: {error}; {remedy}.") from None

    def require(self, key: ProfileKey, path: str | Path) -> None:
        """Raises ProfileMismatch, naming each differing field and both values, unless this profile is for `key`."""
        differing = [
            f"{name} is {mine!r} there and {theirs!r} here"
            for name, mine in dataclasses.asdict(self.key).items()
            if mine != (theirs := dataclasses.asdict(key)[name])
        ]
        if differing:
            raise ProfileMismatch(
                f"The roofline profile {path} was calibrated for something else: {'; '.join(differing)}. "
                "Calibrate again or name another profile."
            )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} stands in it, which is no number")


def _profile(content: object) -> Profile:
    top = _mapping(content, "the file")
    _expect_fields(
        top, "the file",
        {"version", "created", "key", "constants", "coefficients", "draft_max_rows", "diagnostics", "samples"},
    )  # fmt: skip
    if top["version"] != VERSION:
        raise ValueError(f"version={top['version']!r} where this release reads {VERSION}")
    limit = top["draft_max_rows"]
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"draft_max_rows={limit!r} must be null or an integer of at least 1")
    if not isinstance(top["samples"], list):
        raise ValueError(f"samples is a {type(top['samples']).__name__} where a list belongs")
    samples = [_build(Sample, value, f"samples[{i}]") for i, value in enumerate(top["samples"])]
    return Profile(
        key=_build(ProfileKey, top["key"], "key"),
        roofline=Roofline(
            _build(ModelConstants, top["constants"], "constants"),
            _build(Coefficients, top["coefficients"], "coefficients"),
        ),
        draft_max_rows=limit,
        diagnostics=dict(_mapping(top["diagnostics"], "diagnostics")),
        created=_text(top["created"], "created"),
        samples=samples,
    )


def _build(kind: type[T], value: object, where: str) -> T:
    """A `kind` from the JSON object at `where`: its fields exactly, texts where it has texts, numbers elsewhere."""
    content = _mapping(value, where)
    declared = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    _expect_fields(content, where, set(declared))
    for name, entry in content.items():
        if declared[name].type is str:
            _text(entry, f"{where}.{name}")
    try:
        return kind(**content)
    except ValueError as error:
        raise ValueError(f"{where}.{str(error).rstrip('.')}") from None


def _expect_fields(content: dict[str, Any], where: str, expected: set[str]) -> None:
    if missing := sorted(expected - set(content)):
        raise ValueError(f"{where} lacks {missing}")
    if unknown := sorted(set(content) - expected):
        raise ValueError(f"{where} has the unknown {unknown}")


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__} where an object belongs")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}={value!r} is a {type(value).__name__} where a text belongs")
    return value
