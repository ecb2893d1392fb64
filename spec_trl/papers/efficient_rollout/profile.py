"""Reads and writes a calibrated roofline as a JSON file, and predicts the seconds of rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...generation.planner.model_constants import ModelConstants, ProfileKey
from ...json_files import read_json, write_json
from .roofline import Coefficients, Roofline
from .sweep import Sample


class ProfileMismatch(ValueError):
    """A profile of other hardware, shape, precision, quantization or kernel than the running ones."""


@dataclass(frozen=True)
class Profile:
    """One calibration."""

    key: ProfileKey  # scope of validity
    roofline: Roofline  # constants and fitted coefficients
    draft_max_rows: int | None  # most rows that the drafter's kernel serves; None: no limit
    diagnostics: dict[str, Any]  # errors of the fit, as plain data
    created: str  # ISO date
    samples: list[Sample] = field(default_factory=list)  # fitted ones, for plots and refits

    def save(self, path: str | Path) -> None:
        own, fitted = self.roofline.constants, self.roofline.coefficients
        file = _File(1, self.created, self.key, own, fitted, self.draft_max_rows, self.diagnostics, self.samples)
        write_json(path, file)

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Reads the file of `save`. Raises FileNotFoundError if missing, ValueError if not a profile of this version;
        the message names file, field and value."""
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


if TYPE_CHECKING:
    from ...generation.engine.drafter import Drafter


@dataclass(frozen=True)
class RooflineRounds:
    target: Roofline
    drafters: Mapping[str, Roofline]  # those of networks

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        if not lengths:
            return self.target.target_seconds(batch, length)
        drafts = (
            count * self.drafters[name].draft_seconds(batch, length)
            for name, count in lengths.items()
            if name in self.drafters
        )
        return self.target.verify_seconds(batch, length, width) + sum(drafts)


def roofline_rounds(drafters: "Sequence[Drafter]", profile: Profile) -> RooflineRounds:
    """Predicts seconds of rounds of `drafters` by a calibrated profile."""
    networks = {each.strategy: roofline_of(each, profile) for each in drafters if each.has_probabilities}
    return RooflineRounds(profile.roofline, networks)


def roofline_of(drafter: "Drafter", profile: Profile) -> Roofline:
    """Predicts rounds of `drafter`, a network.

    A drafter other than the policy's copy is predicted by its weights and FLOP, and by the target's coefficients,
    since its kernels are dense too. A forward that drafts many tokens is divided among them.
    """
    cost = drafter.cost
    if cost is None:
        return profile.roofline
    k, c, share = profile.roofline.constants, profile.roofline.coefficients, 1 / cost.tokens
    return Roofline(
        replace(k, draft_weight_bytes=cost.weight_bytes * share, draft_expert_bytes=0.0),
        replace(c, eta_D=1.0, c_D=c.c_T * share, t_D=c.t_T * share, phi_D=cost.dense_flops * share / k.dense_flops),
    )
