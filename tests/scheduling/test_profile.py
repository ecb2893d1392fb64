"""Profiles as files: saved, loaded, edited by hand, cut short, and used where they do not belong."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_trl.scheduling.profile import Profile, ProfileKey, ProfileMismatch
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.sweep import Sample


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


def test_round_trip(path: Path) -> None:
    assert Profile.load(path) == PROFILE
    unlimited = replace(PROFILE, draft_max_rows=None, samples=[])
    unlimited.save(path)
    assert Profile.load(str(path)) == unlimited
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_a_failed_save_leaves_the_old_file(path: Path) -> None:
    with pytest.raises(ValueError):
        replace(PROFILE, diagnostics={"target_mape": math.nan}).save(path)
    assert Profile.load(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_every_truncation_is_one_clear_error(path: Path) -> None:
    text = path.read_text().rstrip()
    for end in range(0, len(text), 97):
        path.write_text(text[:end])
        with pytest.raises(ValueError, match=r"profile\.json is not a valid roofline profile: .*calibrate again"):
            Profile.load(path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["version"], 2, "version=2 where this release reads 1"),
        (["draft_max_rows"], 0, "draft_max_rows=0 must be null or"),
        (["draft_max_rows"], True, "draft_max_rows=True must be null or"),
        (["created"], 5, "created=5 is a int where a text belongs"),
        (["key"], "CPU", "key is a str where an object belongs"),
        (["key", "dtype"], None, r"key\.dtype=None is a NoneType where a text belongs"),
        (["coefficients", "eta_D"], -1.0, r"coefficients\.eta_D=-1\.0 is out of range"),
        (["coefficients", "BW_eff"], 0, r"coefficients\.BW_eff=0 is out of range"),
        (["coefficients", "c_V"], "1e-5", r"coefficients\.c_V='1e-5' is a str; it must be a number"),
        (["coefficients", "c_V"], None, r"coefficients\.c_V=None is a NoneType"),
        (["coefficients", "c_V"], math.nan, "NaN stands in it"),
        (["coefficients", "c_V"], math.inf, "Infinity stands in it"),
        (["coefficients", "tile"], 3.5, r"coefficients\.tile=3\.5 is a float; it must be an integer"),
        (["coefficients", "speed"], 3.5, r"coefficients has the unknown \['speed'\]"),
        (["constants", "weight_bytes"], 0, r"constants\.weight_bytes=0 is out of range"),
        (["constants", "name"], 1, r"constants\.name=1 is a int where a text belongs"),
        (["samples"], {}, "samples is a dict where a list belongs"),
        (["samples", 1, "seconds"], 0, r"samples\[1\]\.seconds=0 is out of range"),
        (["samples", 1, "mode"], "x", r"samples\[1\]\.mode='x' is unknown"),
        (["samples", 1, "mode"], [], r"samples\[1\]\.mode=\[\] is unknown"),
        (["samples", 0], 7, r"samples\[0\] is a int where an object belongs"),
        (["diagnostics"], [], "diagnostics is a list where an object belongs"),
        (["note"], "mine", r"the file has the unknown \['note'\]"),
    ],
)
def test_a_hand_edit_is_named(path: Path, where: list[Any], value: object, message: str) -> None:
    content = json.loads(path.read_text())
    holder = content
    for step in where[:-1]:
        holder = holder[step]
    holder[where[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("where", [["key"], ["coefficients", "rho_kappa"], ["samples", 0, "batch"], ["version"]])
def test_a_missing_field_is_named(path: Path, where: list[Any]) -> None:
    content = json.loads(path.read_text())
    holder = content
    for step in where[:-1]:
        holder = holder[step]
    del holder[where[-1]]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"lacks \['{where[-1]}'\]"):
        Profile.load(path)


def test_valid_edits_are_accepted(path: Path) -> None:
    content = json.loads(path.read_text())
    content["coefficients"]["c_V"] = 1  # an integer is a number
    path.write_text(json.dumps(content))
    assert Profile.load(path).roofline.coefficients.c_V == 1


def test_json_that_is_no_profile(path: Path) -> None:
    for text in ("[]", "3", "null", '"x"', "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a valid roofline profile: the file"):
            Profile.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a valid roofline profile"):
        Profile.load(path)
    with pytest.raises(FileNotFoundError):
        Profile.load(path.with_name("absent.json"))


def test_require_names_each_difference(path: Path) -> None:
    PROFILE.require(replace(KEY), path)
    other = replace(KEY, hardware="Other CPU", kernel="marlin")
    with pytest.raises(ProfileMismatch) as caught:
        PROFILE.require(other, path)
    message = str(caught.value)
    assert str(path) in message and "Calibrate again" in message
    assert "hardware is 'Some CPU, 2 threads' there and 'Other CPU' here" in message
    assert "kernel is 'torch_int4' there and 'marlin' here" in message
    assert "dtype" not in message and "shape" not in message


def test_file_names_are_safe_and_differ_with_every_field() -> None:
    names = {KEY.file_name}
    for field in vars(KEY):
        names.add(replace(KEY, **{field: vars(KEY)[field] + "/x"}).file_name)
    names.add(replace(KEY, hardware="a" * 300).file_name)
    assert len(names) == 8
    assert all("/" not in name and " " not in name and len(name) < 150 for name in names)
