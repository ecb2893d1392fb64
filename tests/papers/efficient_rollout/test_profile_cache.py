"""Profiles are found again, made where they are asked for, and refused where they are wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig
from spec_trl.generation import measuring
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.papers.efficient_rollout import profile_cache
from spec_trl.papers.efficient_rollout.calibration import calibrate
from spec_trl.papers.efficient_rollout.profile import Profile, ProfileMismatch
from spec_trl.papers.efficient_rollout.profile_cache import find_profile
from tests.generation.calls import generate, outputs, pad_left, random_rows


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch, profile: Profile) -> list[tuple[int, int]]:
    """Every calibration is answered at once with the module's profile, which is for 4 rows and 600 tokens."""
    asked = []

    def answer(model: Any, config: SpeculativeConfig, max_batch_size: int, max_length: int, **_: Any) -> Profile:
        asked.append((max_batch_size, max_length))
        return profile

    monkeypatch.setattr(profile_cache, "calibrate", answer)
    return asked


Find = Callable[..., Profile | None]


@pytest.fixture
def find(policy: LlamaForCausalLM) -> Find:
    return lambda rows=4, length=600, toggle="roofline", copy=None, **options: find_profile(
        policy, SpeculativeConfig(sd_toggle=toggle, **options), rows, length, extra_copy=copy
    )


@pytest.fixture
def alien(profile: Profile, tmp_path: Path) -> str:
    """The file of a profile of another model."""
    replace(profile, key=replace(profile.key, shape="another")).save(tmp_path / "alien.json")
    return str(tmp_path / "alien.json")


def test_profile_for_less_is_measured_again_for_both(find: Find, calibrations: list[tuple[int, int]]) -> None:
    for rows, length in ((4, 600), (8, 1000), (16, 100), (2, 2000)):
        find(rows, length)
    assert calibrations == [(4, 600), (16, 600), (4, 2000)]


def test_cache_that_cannot_be_written_or_read_is_no_reason_to_stop(
    find: Find, profile: Profile, calibrations: list[Any], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find()
    (file,) = cache.iterdir()
    file.write_text("{")
    with pytest.warns(UserWarning, match="is left aside"):
        assert find() == profile
    assert len(calibrations) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "file"))
    named = tmp_path / "named.json"
    with pytest.warns(UserWarning, match="could not be kept in"):
        assert find(efficient_rollout=dict(profile=str(named))) == profile
    assert Profile.load(named) == profile


def test_calibration_that_fails_does_not_end_a_run(find: Find, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("the kernel's own trouble")

    monkeypatch.setattr(SelfDrafter, "propose", fail)
    with pytest.warns(UserWarning, match="could not be calibrated, .* measured rounds alone decide"):
        assert find(1, 200) is None
    assert not cache.exists()


def test_without_a_kernel_only_measuring_tells(
    find: Find, policy: LlamaForCausalLM, calibrations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "find_kernel", lambda *_: "nothing for this machine")
    assert find() is None and calibrations == []
    with pytest.raises(ValueError, match="draft_kernel='auto' with .* can pack no layer"):
        calibrate(policy)


def test_a_profile_is_for_the_kernels_that_a_copy_gets(
    policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each other shape that is asked for would be measured, which takes seconds."""
    asked: set[tuple[int, ...]] = set()
    find = measuring.find_kernel
    monkeypatch.setattr(
        measuring,
        "find_kernel",
        lambda name, layer, *more: asked.add((layer.out_features, *layer.siblings)) or find(name, layer, *more),
    )
    measuring.profile_key(policy, SpeculativeConfig())
    copied = SelfDrafter(policy, lm_head="dense", packs_later=True).quantized.layers.values()
    packed = [weight.layer for layer in copied for weight in layer.packed_weights]
    assert asked == {(layer.out_features, *layer.siblings) for layer in packed} and any(
        len(each) > 2 for each in asked
    )


def test_wrong_files_are_errors_before_any_work(
    find: Find, profile: Profile, calibrations: list[Any], alien: str, tmp_path: Path
) -> None:
    with pytest.raises(ProfileMismatch, match="shape is 'another' there"):
        find(efficient_rollout=dict(profile=alien, mismatch="error"))
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="broken.json is not a valid roofline profile"):
        find(efficient_rollout=dict(profile=str(path)))
    with pytest.raises(ValueError, match="efficient_rollout.profile='.*absent.json' does not exist"):
        find(toggle="measured", efficient_rollout=dict(profile=str(tmp_path / "absent.json")))
    assert calibrations == []
    with pytest.warns(UserWarning, match="shape is 'another' there.*Calibrating again"):
        assert find(efficient_rollout=dict(profile=alien)) == profile
    assert Profile.load(alien).key.shape == "another"


def test_found_again_and_measuring_makes_nothing(
    find: Find, profile: Profile, calibrations: list[Any], alien: str, tmp_path: Path
) -> None:
    assert find(toggle="measured") is None and calibrations == []
    assert find(8, 100) == find(8, 100, copy=tmp_path / "copy.json") == Profile.load(tmp_path / "copy.json") == profile
    path = str(tmp_path / "profile.json")
    with pytest.warns(UserWarning, match="does not exist and is written now"):
        assert find(efficient_rollout=dict(profile=path)) == profile
    for toggle in ("roofline", "measured"):
        assert find(toggle=toggle, efficient_rollout=dict(profile=path)) == Profile.load(path) == profile
    assert find(toggle="measured") == profile
    with pytest.warns(UserWarning, match="shape is 'another' there.*Rounds are measured instead"):
        find(toggle="measured", efficient_rollout=dict(profile=alien))
    assert calibrations == [(8, 100)]


def test_a_run_beyond_what_was_calibrated_is_told_so(
    find: Find, calibrations: list[Any], recwarn: pytest.WarningsRecorder
) -> None:
    find()
    for toggle in ("roofline", "measured"):
        find(toggle=toggle)
        assert not recwarn.list
        with pytest.warns(UserWarning, match=r"less than this run: max_length 700 \(calibrated: 600\)"):
            find(3, 700, toggle)


def test_generate_calibrates_when_the_toggle_asks_for_it(policy: LlamaForCausalLM, calibrations: list[Any]) -> None:
    prompts = pad_left(random_rows([5, 9, 7]))
    result = generate(policy, prompts, "self", {"sd_toggle": "roofline", "draft_kernel": "auto"})
    assert calibrations == [(3, 9 + 24)]
    assert outputs(result) == outputs(generate(policy, prompts))
    generate(policy, prompts, "none", {"sd_toggle": "roofline"})
    assert len(calibrations) == 1
