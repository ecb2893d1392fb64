"""Calibration drives the engine itself."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.generation.measuring import profile_key
from spec_trl.papers.efficient_rollout import calibration
from spec_trl.papers.efficient_rollout.calibration import calibrate, sweep
from spec_trl.papers.efficient_rollout.fit import Diagnostics, SignAccuracy, evaluate
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.sweep import Sample
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


def quick(policy: LlamaForCausalLM, drafter: SelfDrafter, max_batch: int, max_length: int) -> list[Sample]:
    with torch.no_grad():
        return sweep(policy, drafter, max_batch, max_length, budget=0.1, bar=None, config=SpeculativeConfig())


def test_a_profile_covers_the_grid_that_fits(policy: LlamaForCausalLM, profile: Profile) -> None:
    cells = {(s.mode, s.batch, s.length, s.draft_length) for s in profile.samples}
    assert all(s.seconds > 0 for s in profile.samples)
    assert {length for _, _, length, _ in cells} == {128.0, 588.0}  # 600 less a round's drafts
    batches = {1, 2, 3, 4}
    assert {batch for mode, batch, *_ in cells if mode == "target"} == batches
    for mode in ("draft", "verify"):
        assert {(b, g) for m, b, _, g in cells if m == mode} == {(b, g) for b in batches for g in (3, 7, 11)}
    assert profile.draft_max_rows == SelfDrafter(policy).max_rows
    found = evaluate(profile.roofline, profile.samples)
    assert profile.diagnostics["target_mape"] == found.target_mape
    assert profile.diagnostics["points"] == found.points == 4 * 2 * 3


def test_beyond_the_kernels_rows_only_verification_is_timed(policy: LlamaForCausalLM) -> None:
    drafter = SelfDrafter(policy)
    drafter.max_rows = 2
    samples = quick(policy, drafter, max_batch=4, max_length=100)
    verified = {(s.batch, s.draft_length) for s in samples if s.mode == "verify"}
    assert {s.batch for s in samples if s.mode == "draft"} == {1, 2}
    assert {g for b, g in verified if b <= 2} == {3, 7, 11} and {g for b, g in verified if b > 2} == {7}


def test_memory_limits_the_grid(policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = calibration.model_constants(policy).kv_bytes
    monkeypatch.setattr(calibration, "free_memory", lambda device: 2 * 140 * per_token / calibration.MEMORY_SHARE)
    assert {s.batch for s in quick(policy, SelfDrafter(policy), max_batch=64, max_length=250)} == {1, 2}


def test_a_round_is_the_engines(policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow round shows in the target's and the verify time, a slow drafter in its own."""

    def slowed(work: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        return lambda *args, **kwargs: time.sleep(seconds) or work(*args, **kwargs)

    monkeypatch.setattr(Rollout, "decode_round", slowed(Rollout.decode_round, 0.02))
    monkeypatch.setattr(SelfDrafter, "propose", slowed(SelfDrafter.propose, 0.05))
    for sample in quick(policy, SelfDrafter(policy), max_batch=1, max_length=100):
        floor = {"target": 0.02, "verify": 0.02, "draft": 0.05 / max(sample.draft_length, 1)}[sample.mode]
        assert floor <= sample.seconds


@pytest.mark.parametrize(("accuracy", "is_told"), [(0.6, True), (0.8, False), (1.0, False)])
def test_a_roofline_no_better_than_guessing_is_told(
    policy: LlamaForCausalLM, profile: Profile, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder,
    accuracy: float, is_told: bool,
) -> None:  # fmt: skip
    signs = (SignAccuracy(1.0, accuracy, majority=0.7),)
    monkeypatch.setattr(calibration, "sweep", lambda *_: profile.samples)
    monkeypatch.setattr(calibration, "fit", lambda *_, **__: (profile.roofline, Diagnostics(0, 0, 0, 0, signs, 1)))
    calibrate(policy, progress=False)
    assert any("no better than guessing" in str(warning.message) for warning in recwarn) is is_told


def test_calibration_leaves_the_model_as_it_was(policy: LlamaForCausalLM, profile: Profile) -> None:
    prompts = pad_left(random_rows([5, 9]))
    fresh = tiny_llama(hidden_size=32, intermediate_size=32).float()
    assert outputs(generate(policy, prompts, "self")) == outputs(generate(fresh, prompts, "self"))
    assert policy.training == fresh.training


def test_key_names_what_a_profile_depends_on(policy: LlamaForCausalLM) -> None:
    config = SpeculativeConfig()
    key = profile_key(policy, config)
    assert f"{torch.get_num_threads()} threads" in key.hardware and key.dtype == "float32"
    same = tiny_llama(seed=5, hidden_size=32, intermediate_size=32).float()
    assert key == profile_key(same, config)  # weights do not matter, nor does a name
    changed = [
        profile_key(policy, replace(config, draft_quantization="rtn-w4-g32")),
        profile_key(policy, replace(config, draft_kernel="reference")),  # "auto" takes a fast one
        profile_key(policy, replace(config, efficient_rollout=dict(lm_head="dense"))),
        profile_key(tiny_llama(hidden_size=32, intermediate_size=64).float(), config),
        profile_key(same.double(), config),
    ]
    assert len({key, *changed}) == 6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert profile_key(policy, config).dtype == "bfloat16"
