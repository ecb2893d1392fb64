"""Calibration drives the engine itself, and its profile is found again."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.measuring import fill_profile
from spec_trl.measuring.fill_profile import calibrate, profile_key
from spec_trl.scheduling.fit import evaluate
from spec_trl.scheduling.profile import Profile
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def policy() -> LlamaForCausalLM:
    return tiny_llama().float()


@pytest.fixture(scope="module")
def profile(policy: LlamaForCausalLM) -> Profile:
    """A real one, of the tiny policy."""
    return calibrate(policy, max_batch_size=4, max_length=600, budget_seconds=1.0, progress=False)


def test_sweep_covers_the_grid_that_fits(policy: LlamaForCausalLM, profile: Profile) -> None:
    cells = {(s.mode, s.batch, s.length, s.draft_length) for s in profile.samples}
    assert all(s.seconds > 0 for s in profile.samples)
    assert {length for _, _, length, _ in cells} == {128.0, 588.0}  # 600 less a round's drafts
    batches = {1, 2, 3, 4}
    assert {batch for mode, batch, *_ in cells if mode == "target"} == batches
    for mode in ("draft", "verify"):
        assert {(b, g) for m, b, _, g in cells if m == mode} == {(b, g) for b in batches for g in (3, 7, 11)}
    assert profile.draft_max_rows == SelfDrafter(policy).max_rows


def test_beyond_the_kernels_rows_only_verification_is_timed(policy: LlamaForCausalLM) -> None:
    drafter = SelfDrafter(policy)
    drafter.max_rows = 2
    with torch.no_grad():
        samples = fill_profile._sweep(
            policy, drafter, max_batch=4, max_length=200, budget=0.1, bar=None, config=SpeculativeConfig()
        )
    drafted = {s.batch for s in samples if s.mode == "draft"}
    verified = {(s.batch, s.draft_length) for s in samples if s.mode == "verify"}
    assert drafted == {1, 2}
    assert {g for b, g in verified if b <= 2} == {3, 7, 11} and {g for b, g in verified if b > 2} == {7}


def test_memory_limits_the_grid(policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = fill_profile.model_constants(policy).kv_bytes
    monkeypatch.setattr(fill_profile, "free_memory", lambda device: 2 * 140 * per_token / fill_profile.MEMORY_SHARE)
    with torch.no_grad():
        samples = fill_profile._sweep(
            policy, SelfDrafter(policy), 64, 250, budget=0.1, bar=None, config=SpeculativeConfig()
        )
    assert {s.batch for s in samples} == {1, 2}


def test_sweep_times_the_engine_with_the_policys_own_weights(
    policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed is the engine's round: a slow sampler shows in the target's time, a slow drafter in its own."""

    def slowed(owner: Any, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, slow)

    slowed(fill_profile.Rollout, "_accept", 0.05)
    slowed(SelfDrafter, "propose", 0.1)
    with torch.no_grad():
        samples = fill_profile._sweep(
            policy, SelfDrafter(policy), 1, 200, budget=0.1, bar=None, config=SpeculativeConfig()
        )
    for sample in samples:
        floor = {"target": 0.05, "verify": 0.05, "draft": 0.1 / max(sample.draft_length, 1)}[sample.mode]
        assert floor <= sample.seconds


def test_diagnostics_are_those_of_the_profile_that_is_kept(profile: Profile) -> None:
    found = evaluate(profile.roofline, profile.samples)
    assert profile.diagnostics["target_mape"] == found.target_mape
    assert profile.diagnostics["points"] == found.points == 4 * 2 * 3


def test_calibration_leaves_the_model_as_it_was(policy: LlamaForCausalLM, profile: Profile) -> None:
    prompts = pad_left(random_rows([5, 9]))
    fresh = tiny_llama().float()
    assert outputs(generate(policy, prompts, "self")) == outputs(generate(fresh, prompts, "self"))
    assert policy.training == fresh.training


def test_key_names_what_a_profile_depends_on(policy: LlamaForCausalLM) -> None:
    config = SpeculativeConfig()
    key = profile_key(policy, config)
    assert f"{torch.get_num_threads()} threads" in key.hardware and key.dtype == "float32"
    assert key == profile_key(tiny_llama(seed=5).float(), config)  # weights do not matter, nor does a name
    changed = [
        profile_key(policy, replace(config, draft_quantization="rtn-w8")),
        profile_key(policy, replace(config, draft_kernel="reference")),  # "auto" takes a fast one
        profile_key(policy, replace(config, draft_lm_head="dense")),
        profile_key(tiny_llama(intermediate_size=128).float(), config),
        profile_key(tiny_llama(), config),
    ]
    assert len({key, *changed}) == 6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert profile_key(policy, config).dtype == "bfloat16"
