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
    replace(PROFILE, diagnostics={"target_mape": math.nan}).save(path)  # JSON has no NaN
    assert Profile.load(path).diagnostics == {"target_mape": None}


def test_the_format_on_disk(path: Path) -> None:
    """Files of earlier releases must be read."""
    content = json.loads(path.read_text())
    assert list(content) == [
        "version", "created", "key", "constants", "coefficients", "draft_max_rows", "diagnostics", "samples"
    ]  # fmt: skip
    assert content["version"] == 1 and content["key"] == vars(KEY)
    assert content["samples"][0] == vars(PROFILE.samples[0])
    content["coefficients"]["c_V"] = 1  # an integer is a number
    path.write_text(json.dumps(content))
    assert Profile.load(path).roofline.coefficients.c_V == 1


def test_every_truncation_is_one_clear_error(path: Path) -> None:
    text = path.read_text().rstrip()
    for content in (*(text[:end] for end in range(0, len(text), 197)), "[]", "null", "{}"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"profile\.json is not a valid roofline profile: .*calibrate again"):
            Profile.load(path)
    with pytest.raises(FileNotFoundError):
        Profile.load(path.with_name("absent.json"))


MISSING = object()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["version"], 2, r"version: Input should be 1 \(found 2\)"),
        (["version"], MISSING, "version: Field required"),
        (["draft_max_rows"], 0, "draft_max_rows=0 must be null or"),
        (["draft_max_rows"], True, r"draft_max_rows: .* integer \(found True\)"),
        (["created"], 5, r"created: .* string \(found 5\)"),
        (["key"], "CPU", r"key: Input should be an object \(found 'CPU'\)"),
        (["key"], MISSING, "key: Field required"),
        (["key", "dtype"], None, r"key\.dtype: .* string \(found None\)"),
        (["coefficients", "eta_D"], -1.0, r"coefficients: eta_D=-1\.0 is out of range"),
        (["coefficients", "c_V"], "1e-5", r"coefficients\.c_V: .* number \(found '1e-5'\)"),
        (["coefficients", "c_V"], math.inf, r"coefficients: c_V=inf is out of range"),
        (["coefficients", "rho_kappa"], MISSING, r"coefficients\.rho_kappa: Field required"),
        (["coefficients", "tile"], 3.5, r"coefficients\.tile: .* integer \(found 3\.5\)"),
        (["coefficients", "speed"], 3.5, r"coefficients\.speed: Unexpected"),
        (["constants", "weight_bytes"], 0, r"constants: weight_bytes=0\.0 is out of range"),
        (["samples"], {}, r"samples: .* array"),
        (["samples", 1, "seconds"], 0, r"samples\[1\]: seconds=0\.0 is out of range"),
        (["samples", 1, "mode"], "x", r"samples\[1\]\.mode: Input should be 'target', 'draft' or 'verify'"),
        (["diagnostics"], [], "diagnostics: "),
        (["note"], "mine", "note: Unexpected"),
    ],
)
def test_a_hand_edit_is_named(path: Path, where: list[Any], value: object, message: str) -> None:
    content = holder = json.loads(path.read_text())
    for step in where[:-1]:
        holder = holder[step]
    if value is MISSING:
        del holder[where[-1]]
    else:
        holder[where[-1]] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


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
