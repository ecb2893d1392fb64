"""The JSON files of spec_trl: typed, strict, written whole or not at all."""

import json
import os
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spec_trl.json_files import read_json, replacing, write_atomically, write_json


@dataclass
class _Point:
    x: int
    y: float = 0.0

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x must not be negative")


@dataclass
class _Shape:
    version: int
    name: str | None = None
    points: list[_Point] = field(default_factory=list)


@dataclass
class _Free:
    settings: dict[str, Any]


def _read(path: Path) -> _Shape:
    return read_json(path, _Shape, "shape", "draw it again")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Numbers that JSON has not become null."""
    shape = _Shape(1, "ü", [_Point(3, 0.1), _Point(4)])
    write_json(tmp_path / "new" / "shape.json", shape)
    assert _read(tmp_path / "new" / "shape.json") == shape
    write_json(tmp_path / "point.json", _Point(1, float("nan")))
    assert json.loads((tmp_path / "point.json").read_text()) == {"x": 1, "y": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"name": "a"}, "version: Field required"),
        ({"version": "1"}, "version: Input should be a valid integer (found '1')"),
        ({"version": 1, "nmae": "a"}, "nmae: Unexpected keyword argument (found 'a')"),
        ({"version": 1, "points": [{"x": 1}, {"x": 2.5}]}, "points[1].x: "),
        ({"version": 1, "points": [{"x": -1}]}, "points[0]: x must not be negative"),
        ({"version": "2", "name": 3}, "version: "),  # a file of another version differs elsewhere too
        ([], "Input should be an object"),
        ("{", "Invalid JSON"),
    ],
)
def test_a_damaged_file_is_named_with_field_value_and_remedy(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "shape.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match="is not a valid shape") as caught:
        _read(path)
    assert str(path) in str(caught.value) and message in str(caught.value)
    assert str(caught.value).endswith("draw it again.")


def test_settings_that_json_has_not(tmp_path: Path) -> None:
    settings = dict(
        module=torch.nn.Sequential(*map(torch.nn.Identity, range(20))), dtype=torch.bfloat16, path=Path("/a"),
        device=torch.device("cpu"), function=json.dumps, kind=Path, number=np.float32(0.5), scalar=torch.tensor(3),
        table=torch.ones(100, 100), level=IntEnum("Level", "LOW")(1), some={3},
    )  # fmt: skip
    write_json(tmp_path / "free.json", _Free(settings))
    assert json.loads((tmp_path / "free.json").read_text()) == {"settings": dict(
        module="Sequential", dtype="torch.bfloat16", path="/a", device="cpu", function="json.dumps",
        kind="pathlib.Path", number=0.5, scalar=3, table="Tensor", level=1, some=[3],
    )}  # fmt: skip


def test_a_write_that_fails_or_is_broken_off_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with pytest.raises(KeyboardInterrupt), replacing(path) as fresh:
        fresh.write_text("half")
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"
