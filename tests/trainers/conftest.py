"""Profiles and ladders of imaginary machines: no test waits for a measurement, or depends on what it would find."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_trl.generation.configuration import SpeculativeConfig
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine import rollout
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.measuring import profile_cache as profiles_module
from spec_trl.measuring.fill_profile import profile_key
from spec_trl.scheduling.ladder import Ladder, Rung
from spec_trl.scheduling.profile import Profile
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.trainers import shared_measurements
from tests.trainers.harness import tiny_policy


# A forward costs a whole second, however many tokens it holds and much more than any real one of these models: what
# was predicted is only corrected by the measured rounds within their tiny range.
SLOW_TARGET = Roofline(
    ModelConstants("imaginary", 1e6, 0.0, 1.0, 0.0, 0.0),
    Coefficients(F_eff=1e12, BW_eff=1e6, rho_kappa=0.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own profiles."""
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "cache"))


def imaginary_profile(draft_seconds: float) -> Profile:
    """A profile for the tiny policy: a target forward of a second, a draft forward of `draft_seconds`."""
    policy = tiny_policy()
    return Profile(
        key=profile_key(policy, SpeculativeConfig()),
        roofline=replace(SLOW_TARGET, coefficients=replace(SLOW_TARGET.coefficients, t_D=draft_seconds)),
        draft_max_rows=SelfDrafter(policy).max_rows,
        diagnostics={"max_batch_size": 64, "max_length": 4096},
        created="2026-11-21T00:00:00+00:00",
    )


@pytest.fixture
def profiles(tmp_path: Path) -> dict[str, str]:
    """Paths of a profile by which speculation "pays" (1.2 times, at τ = 5), and of one by which it "does not"."""
    paths = {"pays": 0.63, "does not": 10.0}
    for name, draft_seconds in paths.items():
        imaginary_profile(draft_seconds).save(tmp_path / f"{name}.json")
    return {name: str(tmp_path / f"{name}.json") for name in paths}


@pytest.fixture
def quick_calibration(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calibrations return at once; the list has the batch that each was asked for."""
    asked: list[int] = []

    def calibrate(model: Any, config: SpeculativeConfig, max_batch_size: int, max_length: int, **_: Any) -> Profile:
        asked.append(max_batch_size)
        return imaginary_profile(0.0)

    monkeypatch.setattr(profiles_module, "calibrate", calibrate)
    return asked


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round takes a second: what is learned from times does not depend on the machine."""
    seconds = itertools.count()
    monkeypatch.setattr(rollout, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))


Asked = list[tuple[list[str], int, list[int]]]


@pytest.fixture
def level_ladder(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Drafts cost nothing; the list has the drafters, rows and γ that were to be profiled."""
    asked: Asked = []

    def find(model: Any, drafters: list[Drafter], config: Any, rows: int, draft_lengths: list[int]) -> Ladder:
        asked.append(([drafter.strategy for drafter in drafters], rows, draft_lengths))
        return Ladder(tuple(Rung(d.strategy, 1, g, 0.5, 1.0, 1.0) for d in drafters for g in draft_lengths), "level")

    monkeypatch.setattr(shared_measurements, "find_ladder", find)
    return asked
