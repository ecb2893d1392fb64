"""Calibration drives the engine itself, and its profile is found again."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig
from spec_trl.generation import calibrating
from spec_trl.generation.calibrating import calibrate, find_profile, profile_key
from spec_trl.generation.drafters.self_draft import SelfDrafter
from spec_trl.scheduling.calibration import evaluate
from spec_trl.scheduling.profile import Profile, ProfileMismatch
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
    assert {length for _, _, length, _ in cells} == {128.0, 512.0}  # what fits into 600 tokens with drafts behind it
    batches = {1, 2, 3, 4}
    assert {batch for mode, batch, *_ in cells if mode == "target"} == batches
    for mode in ("draft", "verify"):
        assert {(b, g) for m, b, _, g in cells if m == mode} == {(b, g) for b in batches for g in (3, 7, 11)}
    assert profile.draft_max_rows == SelfDrafter(policy).max_rows


def test_beyond_the_kernels_rows_only_verification_is_timed(policy: LlamaForCausalLM) -> None:
    drafter = SelfDrafter(policy)
    drafter.max_rows = 2
    with torch.no_grad():
        samples = calibrating._sweep(
            policy, drafter, max_batch=4, max_length=200, budget=0.1, progress=False, config=SpeculativeConfig()
        )
    drafted = {s.batch for s in samples if s.mode == "draft"}
    verified = {(s.batch, s.draft_length) for s in samples if s.mode == "verify"}
    assert drafted == {1, 2}
    assert {g for b, g in verified if b <= 2} == {3, 7, 11} and {g for b, g in verified if b > 2} == {7}


def test_memory_limits_the_grid(policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = calibrating.model_constants(policy).kv_bytes
    monkeypatch.setattr(calibrating, "free_memory", lambda device: 2 * 140 * per_token / calibrating.MEMORY_SHARE)
    with torch.no_grad():
        samples = calibrating._sweep(
            policy, SelfDrafter(policy), 64, 250, budget=0.1, progress=False, config=SpeculativeConfig()
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

    slowed(calibrating.Rollout, "_accept", 0.05)
    slowed(SelfDrafter, "propose", 0.1)
    with torch.no_grad():
        samples = calibrating._sweep(
            policy, SelfDrafter(policy), 1, 200, budget=0.1, progress=False, config=SpeculativeConfig()
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


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch, profile: Profile) -> list[tuple[int, int]]:
    """Every calibration is answered at once with the module's profile."""
    asked = []

    def answer(model: Any, config: SpeculativeConfig, max_batch_size: int, max_length: int) -> Profile:
        asked.append((max_batch_size, max_length))
        return profile

    monkeypatch.setattr(calibrating, "calibrate", answer)
    return asked


def toggled(**options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(sd_toggle="roofline", **options)


def test_profile_for_less_is_measured_again_for_both(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path
) -> None:
    find_profile(policy, toggled(), 4, 600)  # the module's profile is for 4 rows and 600 tokens
    find_profile(policy, toggled(), 8, 1000)
    assert calibrations == [(4, 600)]
    find_profile(policy, toggled(), 16, 100)
    find_profile(policy, toggled(), 2, 2000)
    assert calibrations == [(4, 600), (16, 600), (4, 2000)]


def test_cache_that_cannot_be_written_or_read_is_no_reason_to_stop(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    find_profile(policy, toggled(), 4, 600)
    (file,) = (tmp_path / "cache" / "spec_trl" / "profiles").iterdir()
    file.write_text("{")
    with pytest.warns(UserWarning, match="is left aside, and the machine calibrated again"):
        assert find_profile(policy, toggled(), 4, 600) == profile
    assert len(calibrations) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "file"))
    named = tmp_path / "named.json"
    with pytest.warns(UserWarning, match="could not be kept in"):
        assert find_profile(policy, toggled(roofline_profile=str(named)), 4, 600) == profile
    assert Profile.load(named) == profile


def test_calibration_that_fails_does_not_end_a_run(
    policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("the kernel's own trouble")

    with monkeypatch.context() as patch:
        patch.setattr(SelfDrafter, "propose", fail)
        with pytest.warns(UserWarning, match="could not be calibrated, .* measured rounds alone decide"):
            assert find_profile(policy, toggled(), 1, 200) is None
    assert not (tmp_path / "cache").exists()


def test_without_a_kernel_only_measuring_tells(
    policy: LlamaForCausalLM, calibrations: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "find_kernel", lambda name, layer: "nothing for this machine")
    assert find_profile(policy, toggled(), 4, 600) is None
    assert calibrations == []
    monkeypatch.undo()
    monkeypatch.setattr(calibrating, "find_kernel", lambda name, layer: "nothing for this machine")
    with pytest.raises(ValueError, match="draft_kernel='auto' with .* can pack no layer"):
        calibrate(policy)


def test_found_again_in_the_cache(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path
) -> None:
    assert find_profile(policy, toggled(), 8, 100) == profile
    assert find_profile(policy, toggled(), 8, 100, extra_copy=tmp_path / "copy.json") == profile
    assert calibrations == [(8, 100)]
    assert Profile.load(tmp_path / "copy.json") == profile
    assert list((tmp_path / "cache" / "spec_trl" / "profiles").iterdir())


def test_missing_file_is_calibrated_and_written(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "profile.json"
    for _ in range(2):
        assert find_profile(policy, toggled(roofline_profile=str(path))) == profile
    assert len(calibrations) == 1 and path.exists()


def test_broken_file_is_an_error_before_any_work(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(ValueError, match="profile.json is not a valid roofline profile"):
        find_profile(policy, toggled(roofline_profile=str(path)))
    assert calibrations == []


def test_profile_of_another_model(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    replace(profile, key=replace(profile.key, shape="another")).save(path)
    given = toggled(roofline_profile=str(path))
    with pytest.raises(ProfileMismatch, match="shape is 'another' there"):
        find_profile(policy, replace(given, roofline_mismatch="error"))
    assert calibrations == []
    with pytest.warns(UserWarning, match="shape is 'another' there.*Calibrating again"):
        assert find_profile(policy, given) == profile
    assert Profile.load(path).key.shape == "another"


def test_generate_calibrates_when_the_toggle_asks_for_it(
    policy: LlamaForCausalLM, calibrations: list[tuple[int, int]]
) -> None:
    prompts = pad_left(random_rows([5, 9, 7]))
    result = generate(policy, prompts, "self", {"sd_toggle": "roofline", "draft_kernel": "auto"})
    assert calibrations == [(3, 9 + 24)]
    assert outputs(result) == outputs(generate(policy, prompts))
    generate(policy, prompts, "none", {"sd_toggle": "roofline"})
    assert len(calibrations) == 1
