"""Profiles as files: saved, loaded, edited by hand, cut short, and used where they do not belong."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from spec_trl.generation.planner.model_constants import ModelConstants, ProfileKey
from spec_trl.papers.efficient_rollout.profile import Profile, ProfileMismatch
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.sweep import Sample


KEY = ProfileKey("Some CPU, 2 threads", "LlamaForCausalLM-2x64", "bfloat16", "rtn-w4-g128", "torch_int4")
PROFILE = Profile(
    key=KEY,
    roofline=Roofline(
        ModelConstants("tiny", 1e6, 3e5, 1e6, 1e3, 512.0),
        Coefficients(1e11, 1e10, 0.9, 2.5, 1e-5, 2e-5, 3e-5, tile=16),
    ),
    draft_max_rows=16,
    diagnostics={"target_mape": 0.02, "signs": [{"threshold": 1.05, "accuracy": 0.97}]},
    created="2026-01-31",
    samples=[Sample(1, 128.0, 0, "target", 0.01), Sample(1, 128.0, 3, "verify", 1 / 3)],
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "profile.json"
    PROFILE.save(path)
    return path


def test_round_trip_and_the_format_on_disk(path: Path) -> None:
    """Files of earlier releases must be read."""
    assert Profile.load(path) == PROFILE
    content = json.loads(path.read_text())
    assert list(content) == [
        "version", "created", "key", "constants", "coefficients", "draft_max_rows", "diagnostics", "samples"
    ]  # fmt: skip
    assert content["version"] == 1 and content["key"] == vars(KEY)
    assert content["samples"][0] == vars(PROFILE.samples[0])
    content["coefficients"]["c_V"] = 1  # an integer is a number
    path.write_text(json.dumps(content))
    assert Profile.load(path).roofline.coefficients.c_V == 1
    unlimited = replace(PROFILE, draft_max_rows=None, samples=[])
    unlimited.save(path)
    assert Profile.load(str(path)) == unlimited
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    replace(PROFILE, diagnostics={"target_mape": math.nan}).save(path)  # JSON has no NaN
    assert Profile.load(path).diagnostics == {"target_mape": None}


def test_every_truncation_is_one_clear_error(path: Path) -> None:
    text = path.read_text().rstrip()
    for content in (*(text[:end] for end in range(0, len(text), 197)), "[]", "null", "{}"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"profile\.json is not a valid roofline profile: .*calibrate again"):
            Profile.load(path)
    with pytest.raises(FileNotFoundError):
        Profile.load(path.with_name("absent.json"))


def test_keys_differ_with_every_field(path: Path) -> None:
    PROFILE.require(replace(KEY), path)
    with pytest.raises(ProfileMismatch) as caught:
        PROFILE.require(replace(KEY, hardware="Other CPU", kernel="marlin"), path)
    message = str(caught.value)
    assert str(path) in message and "Calibrate again" in message
    assert "hardware is 'Some CPU, 2 threads' there and 'Other CPU' here" in message
    assert "kernel is 'torch_int4' there and 'marlin' here" in message
    assert "dtype" not in message and "shape" not in message
    others = [replace(KEY, **{field: vars(KEY)[field] + "/x"}) for field in vars(KEY)]
    names = {key.file_name for key in (KEY, *others, replace(KEY, hardware="a" * 300))}
    assert len(names) == 8
    assert all("/" not in name and " " not in name and len(name) < 150 for name in names)
