"""A calibrated roofline as a JSON file: what it is valid for, the coefficients, and the times they were fitted to."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..json_files import read_json, write_json
from ..scheduling.model_constants import ModelConstants
from ..scheduling.profile_key import ProfileKey
from .roofline import Coefficients, Roofline
from .sweep import Sample


class ProfileMismatch(ValueError):
    """A profile of other hardware, shape, precision, quantization or kernel than what runs."""


@dataclass(frozen=True)
class Profile:
    """One calibration."""

    key: ProfileKey  # what it is valid for
    roofline: Roofline  # constants and fitted coefficients
    draft_max_rows: int | None  # most rows that the drafter's kernel serves; None: no limit
    diagnostics: dict[str, Any]  # errors of the fit, as plain data
    created: str  # ISO date
    samples: list[Sample] = field(default_factory=list)  # what it was fitted to, for plots and refits

    def save(self, path: str | Path) -> None:
        """Writes JSON to `path`, whole or not at all."""
        own, fitted = self.roofline.constants, self.roofline.coefficients
        file = _File(1, self.created, self.key, own, fitted, self.draft_max_rows, self.diagnostics, self.samples)
        write_json(path, file)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads what `save` wrote. Raises FileNotFoundError if there is no such file, ValueError if it is no
        profile of this version; the message names file, field and value."""
        f = read_json(path, _File, "roofline profile", "correct it, or delete the file and calibrate again")
        return cls(f.key, Roofline(f.constants, f.coefficients), f.draft_max_rows, f.diagnostics, f.created, f.samples)

    def require(self, key: ProfileKey, path: str | Path) -> None:
        """Raises ProfileMismatch, naming each differing field and both values, unless this profile is for `key`."""
        differing = [
            f"{name} is {mine!r} there and {vars(key)[name]!r} here"
            for name, mine in vars(self.key).items()
            if mine != vars(key)[name]
        ]
        if differing:
            raise ProfileMismatch(
                f"The roofline profile {path} was calibrated for something else: {'; '.join(differing)}. "
                "Calibrate again or name another profile."
            )


@dataclass(frozen=True)
class _File:
    """A profile as it is written."""

    version: Literal[1]
    created: str
    key: ProfileKey
    constants: ModelConstants
    coefficients: Coefficients
    draft_max_rows: int | None
    diagnostics: dict[str, Any]
    samples: list[Sample]

    def __post_init__(self) -> None:
        if self.draft_max_rows is not None and self.draft_max_rows < 1:
            raise ValueError(f"draft_max_rows={self.draft_max_rows} must be null or an integer of at least 1.")
