"""The choice among kernels by invented times, and the table's file."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spec_trl.quantization.kernels.kernel_times import ROWS, KernelChoice, KernelTable, TableKey
from spec_trl.user_cache import cache_directory


KEY = TableKey("GPU", "torch 2", "8x8", "a, b")


def times(*microseconds: float) -> dict[int, float]:
    return {rows: m * 1e-6 for rows, m in zip(ROWS, microseconds, strict=True)}


DENSE = times(10, 10, 10, 10, 10, 12, 14)


def table(**kernels: dict[int, float]) -> KernelTable:
    return KernelTable(KEY, DENSE, kernels)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "new"))
    return tmp_path / "new/spec_trl/kernels"


@pytest.mark.parametrize(
    ("kernels", "choice"),
    [
        # The fastest with few rows wins, though it ends earlier.
        (dict(few=times(3, 3, 3, 4, 20, 40, 80), many=times(5, 5, 5, 5, 5, 5, 5)), ("few", 8)),
        # From 8 rows on it is not used, so 100 costs nothing: it counts as dense there.
        (dict(small=times(2, 2, 2, 100, 100, 100, 100), all=times(4, 4, 4, 4, 5, 5, 20)), ("small", 4)),
        (dict(one=times(2, 20, 20, 20, 20, 20, 20), all=times(5, 5, 5, 5, 5, 5, 5)), ("all", 64)),
        # A tie goes to the one that lasts longer.
        (dict(short=times(3, 3, 3, 3, 20, 3, 3), long=times(3, 3, 3, 3, 9, 20, 3)), ("long", 16)),
        # The limit is the last before the first defeat.
        (dict(a=times(3, 3, 11, 3, 3, 3, 3)), ("a", 2)),
        # As fast as dense is not faster.
        (dict(a=DENSE), None),
        (dict(a=times(11, 1, 1, 1, 1, 1, 1)), None),
        ({}, None),
    ],
)
def test_choice(kernels: dict[str, dict[int, float]], choice: tuple[str, int] | None) -> None:
    assert table(**kernels).choose() == (None if choice is None else KernelChoice(*choice))


def test_what_is_saved_is_read_again(cache: Path) -> None:
    saved = table(a=times(1, 2, 3, 4, 5, 6, 7))
    with pytest.raises(FileNotFoundError):
        KernelTable.load(KEY)
    saved.save()
    assert KernelTable.load(KEY) == saved
    assert [*cache.iterdir()] == [KEY.path]
    old = {"version": 1, "key": asdict(KEY), "dense": DENSE, "kernels": saved.kernels}
    KEY.path.write_text(json.dumps(old, indent=1) + "\n")  # as the first release wrote it
    assert KernelTable.load(KEY) == saved


def test_a_table_for_something_else_is_refused() -> None:
    for field in ("device", "software", "layer", "kernels"):
        table().save()
        other = replace(KEY, **{field: "another"})
        assert other.path != KEY.path
        KEY.path.rename(other.path)
        with pytest.raises(ValueError, match="is for something else"):
            KernelTable.load(other)


def test_a_damaged_table_is_refused() -> None:
    table().save()
    text = KEY.path.read_text()
    for part, damaged in (
        ("0.000012", "0.0"), ("0.000012", "NaN"), ('"64"', '"65"'), ('"version": 1', '"version": 2'), ("{", "")
    ):  # fmt: skip
        assert part in text
        KEY.path.write_text(text.replace(part, damaged))
        with pytest.raises(ValueError, match=r"json is not a valid table of kernels: .*it is measured again"):
            KernelTable.load(KEY)


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_TRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg/spec_trl/kernels"
