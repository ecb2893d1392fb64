"""The choice among kernels by invented times, and the table's file."""

from dataclasses import replace

import pytest

from spec_trl.quantization.kernels.kernel_table import ROWS, KernelChoice, KernelTable, TableKey, cache_directory


KEY = TableKey("GPU", "torch 2", "8x8", "a, b")


def times(*microseconds):
    return {rows: m * 1e-6 for rows, m in zip(ROWS, microseconds, strict=True)}


DENSE = times(10, 10, 10, 10, 10, 12, 14)


def table(**kernels):
    return KernelTable(DENSE, kernels)


def test_the_fastest_with_few_rows_wins_though_it_ends_earlier():
    chosen = table(few=times(3, 3, 3, 4, 20, 40, 80), many=times(5, 5, 5, 5, 5, 5, 5)).choose()
    assert chosen == KernelChoice("few", 8)


def test_one_that_ends_too_early_counts_as_dense_beyond():
    small = times(2, 2, 2, 100, 100, 100, 100)  # beyond 4 rows it is not used, so 100 costs nothing
    chosen = table(small=small, all=times(4, 4, 4, 4, 5, 5, 20)).choose()
    assert chosen == KernelChoice("small", 4)
    one = times(2, 20, 20, 20, 20, 20, 20)
    assert table(one=one, all=times(5, 5, 5, 5, 5, 5, 20)).choose() == KernelChoice("all", 32)


def test_a_tie_goes_to_the_one_that_lasts_longer():
    chosen = table(short=times(3, 3, 3, 3, 20, 3, 3), long=times(3, 3, 3, 3, 9, 20, 3)).choose()
    assert chosen == KernelChoice("long", 16)


def test_the_limit_is_the_last_before_the_first_defeat():
    assert table(a=times(3, 3, 11, 3, 3, 3, 3)).max_rows("a") == 2
    assert table(a=DENSE).max_rows("a") == 0  # as fast is not faster
    assert table(a=times(1, 1, 1, 1, 1, 1, 1)).max_rows("a") == 64


def test_no_kernel_where_dense_is_fastest():
    assert table(a=times(11, 1, 1, 1, 1, 1, 1)).choose() is None
    assert table().choose() is None


def test_what_is_saved_is_read_again(tmp_path):
    path = tmp_path / "new" / KEY.file_name
    saved = table(a=times(1, 2, 3, 4, 5, 6, 7))
    saved.save(path, KEY)
    assert KernelTable.load(path, KEY) == saved
    assert [file.name for file in path.parent.iterdir()] == [KEY.file_name]


@pytest.mark.parametrize("field", ["device", "software", "layer", "kernels"])
def test_a_table_for_something_else_is_refused(tmp_path, field):
    other = replace(KEY, **{field: "another"})
    assert other.file_name != KEY.file_name
    table().save(tmp_path / "t.json", KEY)
    with pytest.raises(ValueError, match="for something else"):
        KernelTable.load(tmp_path / "t.json", other)


@pytest.mark.parametrize(
    "damage", [("1.2e-05", "0.0"), ("1.2e-05", "NaN"), ('"64"', '"65"'), ('"dense"', '"sparse"'), ("{", "")]
)
def test_a_damaged_table_is_refused(tmp_path, damage):
    path = tmp_path / "t.json"
    table().save(path, KEY)
    text = path.read_text()
    assert damage[0] in text
    path.write_text(text.replace(*damage))
    with pytest.raises(ValueError, match="t.json is not a table of kernels"):
        KernelTable.load(path, KEY)


def test_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path / "spec_trl" / "kernels"
