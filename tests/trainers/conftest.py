"""Trainings that many tests look at, each made once; and profiles and ladders of imaginary machines, so that no test
waits for a measurement or depends on what it would find."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine import rollout
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.measuring import profile_key
from spec_trl.generation.options import SpeculativeConfig
from spec_trl.generation.planner.model_constants import ModelConstants
from spec_trl.papers.efficient_rollout import profile_cache as profiles_module
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.specactor.ladder import Ladder, Rung
from spec_trl.trainers import trainer_speculator
from tests.generation.drafters.watching import make_checkpoint
from tests.trainers.harness import Run, make_run, tiny_dataset, tiny_policy


# A forward costs a whole second, however many tokens it holds and much more than any real one of these models: what
# was predicted is only corrected by the measured rounds within their tiny range.
SLOW_TARGET = Roofline(
    ModelConstants("imaginary", 1e6, 0.0, 1.0, 0.0, 0.0),
    Coefficients(F_eff=1e12, BW_eff=1e6, rho_kappa=0.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


# ---- Machines that are not there ---------------------------------------------------------------------------------


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


Asked = list[tuple[list[str], int, list[int]]]


def use_level_ladder(patch: pytest.MonkeyPatch) -> Asked:
    """Drafts cost nothing from now on; the list gets the drafters, rows and γ that were to be profiled."""
    asked: Asked = []

    def find(model: Any, drafters: list[Drafter], config: Any, rows: int, draft_lengths: list[int]) -> Ladder:
        asked.append(([drafter.strategy for drafter in drafters], rows, draft_lengths))
        return Ladder(tuple(Rung(d.strategy, 1, g, 0.5, 1.0, 1.0) for d in drafters for g in draft_lengths), "level")

    patch.setattr(trainer_speculator, "find_ladder", find)
    return asked


@pytest.fixture
def level_ladder(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """See :func:`use_level_ladder`."""
    return use_level_ladder(monkeypatch)


def ignore_round_times(patch: pytest.MonkeyPatch) -> None:
    """Every round takes as long as any other."""
    seconds = itertools.count()
    patch.setattr(rollout, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))


# ---- The trainings ------------------------------------------------------------------------------------------------

STEPS = 4


def schedule(**options: Any) -> dict[str, Any]:
    """Two micro-steps per optimizer step; evaluations and checkpoints after every second one; and `options`."""
    return dict(
        max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
        eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, save_strategy="steps", save_steps=2,
        trainer={"train_dataset": tiny_dataset(8), "eval_dataset": tiny_dataset(1)},
    ) | options  # fmt: skip


@pytest.fixture(scope="session")
def none(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Autoregressive rollouts: what all others must equal."""
    return make_run(tmp_path_factory.mktemp("none"), "none", **schedule(save_strategy="no")).train()


LEARNING: dict[str, Any] = schedule(
    tts=dict(learning_rate=1e-3, stride=1), save_total_limit=1, draft_length=[1, 2, 3, 4, 5],
    efficient_rollout=dict(draft_length_up=1e-3, draft_length_down=1e-4, draft_length_patience=1),
)  # fmt: skip
"""Drafts grow longer from rollout to rollout."""


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Drafts by the quantized copy, which learns from them. The run dies while it saves its last checkpoint."""
    run, replace_file = make_run(tmp_path_factory.mktemp("learned"), "tts", **LEARNING), os.replace

    def die_in_the_second_checkpoint(source: str, target: str) -> None:
        if "checkpoint-4" in str(target):
            raise OSError(28, "No space left on device")
        replace_file(source, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "replace", die_in_the_second_checkpoint)
        run.train()
    return run


@pytest.fixture(scope="session")
def learned_resumed(learned: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The second half of `learned`, from the checkpoint that is left."""
    return make_run(tmp_path_factory.mktemp("resumed"), "tts", **LEARNING).train(learned.folder / "checkpoint-2")


@pytest.fixture(scope="session")
def racing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of races between the quantized copy (by AWQ), the history, and a DFlash drafter that is trained too."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("drafter") / "dflash", "dflash", 48)
    return schedule(
        specactor=dict(drafters=["self", "history", "dflash"], budget=1000), assistant_model=checkpoint,
        draft_length=[2, 3], drafter_adaptation=dict(learning_rate=1e-3), draft_quantization="awq-w4-g128",
    )  # fmt: skip


def race(folder: Path, options: dict[str, Any], resume: Path | None = None) -> tuple[Run, Asked]:
    """A run of races on a level ladder, and what was to be profiled."""
    with pytest.MonkeyPatch.context() as patch:
        asked = use_level_ladder(patch)
        ignore_round_times(patch)
        return make_run(folder, "best_of_n", **options).train(resume), asked


@pytest.fixture(scope="session")
def raced(racing: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Asked]:
    """See :func:`race`."""
    return race(tmp_path_factory.mktemp("best_of_n"), racing)


@pytest.fixture(scope="session")
def raced_resumed(raced: tuple[Run, Asked], racing: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The second half of `raced`, from its checkpoint."""
    return race(tmp_path_factory.mktemp("resumed"), racing, raced[0].folder / "checkpoint-2")[0]
