"""Profiles are found again, made where they are asked for, and refused where they are wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.measuring import fill_profile, profile_cache
from spec_trl.measuring.fill_profile import calibrate
from spec_trl.measuring.profile_cache import find_profile
from spec_trl.scheduling.profile import Profile, ProfileMismatch
from tests.generation.calls import generate, outputs, pad_left, random_rows


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch, profile: Profile) -> list[tuple[int, int]]:
    """Every calibration is answered at once with the module's profile."""
    asked = []

    def answer(model: Any, config: SpeculativeConfig, max_batch_size: int, max_length: int, **_: Any) -> Profile:
        asked.append((max_batch_size, max_length))
        return profile

    monkeypatch.setattr(profile_cache, "calibrate", answer)
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
    cache: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    find_profile(policy, toggled(), 4, 600)
    (file,) = cache.iterdir()
    file.write_text("{")
    with pytest.warns(UserWarning, match="is left aside"):
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
    monkeypatch.setattr(fill_profile, "find_kernel", lambda name, layer: "nothing for this machine")
    assert find_profile(policy, toggled(), 4, 600) is None
    assert calibrations == []
    with pytest.raises(ValueError, match="draft_kernel='auto' with .* can pack no layer"):
        calibrate(policy)


def test_found_again_in_the_cache_and_where_it_was_written(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path
) -> None:
    assert find_profile(policy, toggled(), 8, 100) == profile
    assert find_profile(policy, toggled(), 8, 100, extra_copy=tmp_path / "copy.json") == profile
    assert calibrations == [(8, 100)]
    assert Profile.load(tmp_path / "copy.json") == profile
    path = tmp_path / "profile.json"
    with pytest.warns(UserWarning, match="does not exist and is written now"):
        assert find_profile(policy, toggled(roofline_profile=str(path))) == profile
    assert find_profile(policy, toggled(roofline_profile=str(path))) == profile
    assert len(calibrations) == 2 and Profile.load(path) == profile


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


def measured(**options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(sd_toggle="measured", **options)


def test_measuring_uses_what_there_is_and_makes_nothing(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], tmp_path: Path
) -> None:
    assert find_profile(policy, measured(), 4, 600) is None
    path = tmp_path / "profile.json"
    with pytest.raises(ValueError, match="roofline_profile='.*profile.json' is no file that exists"):
        measured(roofline_profile=str(path))
    assert calibrations == []
    find_profile(policy, toggled(roofline_profile=str(path)), 4, 600)
    assert find_profile(policy, measured(), 4, 600) == profile == find_profile(
        policy, measured(roofline_profile=str(path)), 4, 600
    )
    replace(profile, key=replace(profile.key, shape="another")).save(path)
    with pytest.warns(UserWarning, match="shape is 'another' there.*Rounds are measured instead"):
        find_profile(policy, measured(roofline_profile=str(path)), 4, 600)
    assert len(calibrations) == 1


def test_a_run_beyond_what_was_calibrated_is_told_so(
    policy: LlamaForCausalLM, profile: Profile, calibrations: list[tuple[int, int]], recwarn: pytest.WarningsRecorder
) -> None:
    for config in (toggled(), measured()):
        find_profile(policy, config, 4, 600)
        assert not recwarn.list
        with pytest.warns(UserWarning, match=r"less than this run: max_length 700 \(calibrated: 600\)"):
            find_profile(policy, config, 3, 700)
        recwarn.clear()


def test_generate_calibrates_when_the_toggle_asks_for_it(
    policy: LlamaForCausalLM, calibrations: list[tuple[int, int]]
) -> None:
    prompts = pad_left(random_rows([5, 9, 7]))
    result = generate(policy, prompts, "self", {"sd_toggle": "roofline", "draft_kernel": "auto"})
    assert calibrations == [(3, 9 + 24)]
    assert outputs(result) == outputs(generate(policy, prompts))
    generate(policy, prompts, "none", {"sd_toggle": "roofline"})
    assert len(calibrations) == 1
