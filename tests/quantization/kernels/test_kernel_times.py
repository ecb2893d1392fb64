"""Measuring kernels with invented times: the choice, what is timed, what is saved, and kernels that fail."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.quantization import kernels as kernel_choice
from spec_trl.quantization.kernels import PackedWeight, find_kernel, kernel_times, make_packed
from spec_trl.quantization.kernels.base import Package
from spec_trl.quantization.kernels.kernel_times import ROWS, KernelChoice, KernelTable, TableKey
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.kernels.torch_core import TorchInt4Cpu
from tests.quantization.conftest import as_kernel as kernel
from tests.quantization.conftest import layer_spec, on_gpu


LAYER = layer_spec(96, activation_dtype=torch.bfloat16)
KEY = TableKey("GPU", "torch 2", "8x8", "a, b")


def forget_zeros(packed: ReferenceInt4, x: Tensor) -> Tensor:
    packed.zeros[77] = 0
    return ReferenceInt4.linear(packed, x)


def return_nan(packed: ReferenceInt4, x: Tensor) -> Tensor:
    y = ReferenceInt4.linear(packed, x)
    y[-1, 5] = torch.nan
    return y


def fail(*_: Any) -> None:
    raise RuntimeError("nvcc: command not found")


SLOW = kernel("slow")


class Timer:
    """Invented seconds by kernel; remembers what was timed and in which dtype, and runs a call."""

    def __init__(self, **microseconds: float) -> None:
        self.microseconds = microseconds
        self.timed: list[tuple[str, int]] = []
        self.dtypes: dict[str, torch.dtype] = {}

    def __call__(self, name: str, rows: int, calls: Sequence[Callable[[], Tensor]]) -> float:
        self.timed.append((name, rows))
        assert len(calls) >= kernel_times.MIN_CALLS
        y = calls[0]()
        assert y.shape == (rows, LAYER.out_features)
        self.dtypes[name] = y.dtype
        return self.microseconds[name] * 1e-6 * (1 if rows <= 8 else 4)


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "tables", {})
    monkeypatch.setattr(kernel_times, "failed_kernels", set())


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new_process(monkeypatch)
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))


def test_every_kernel_and_the_dense_layer_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept for the next process, unless the software changes; a damaged file is measured again."""
    timer, both = Timer(dense=10, torch_int4=3, slow=5), [SLOW, TorchInt4Cpu]
    table = kernel_times.kernel_table(LAYER, both, timer)
    expected = [(name, rows) for name in ("dense", "slow", "torch_int4") for rows in ROWS]
    assert timer.timed == expected
    assert table.kernels["slow"][32] == pytest.approx(20e-6)
    assert table.choose().kernel == "torch_int4"
    assert kernel_times.kernel_table(LAYER, both, timer) is table
    new_process(monkeypatch)
    assert kernel_times.kernel_table(LAYER, both, timer) == table and timer.timed == expected
    kernel_times.kernel_table(LAYER, [SLOW], timer)  # of other kernels there is another table
    assert len(timer.timed) == len(expected) + 2 * len(ROWS)
    monkeypatch.setattr(SLOW, "package", Package("torch", "torch", "torch"))
    changed = kernel_times.kernel_table(LAYER, both, Timer(dense=10, torch_int4=3, slow=7))
    assert changed.kernels["slow"][1] == pytest.approx(7e-6)
    changed.key.path.write_text("{")
    new_process(monkeypatch)
    with pytest.warns(UserWarning, match="measured again: .* is not a valid table of kernels"):
        again = kernel_times.kernel_table(LAYER, both, Timer(dense=10, torch_int4=3, slow=6))
    assert again.kernels["slow"][1] == pytest.approx(6e-6)


def test_siblings_are_timed_as_they_run() -> None:
    """As one product where the kernel joins their rows; else, as the dense layers, one after the other."""
    products: list[tuple[str, int]] = []

    def multiply(packed: ReferenceInt4, x: Tensor) -> Tensor:
        products.append((packed.name, packed.layer.out_features))
        return ReferenceInt4.linear(packed, x)

    def timer(name: str, rows: int, calls: Sequence[Callable[[], Tensor]]) -> float:
        products.clear()
        y = calls[-1]()
        assert y.shape[0] == rows
        done[name] = products.copy() if name != "dense" else [("dense", y.shape[1])]
        return 1e-6

    done: dict[str, list[tuple[str, int]]] = {}
    joins, alone = kernel("joins", linear=multiply), kernel("alone", linear=multiply, rows_along={})
    query, key = (replace(layer_spec(rows), siblings=(96, 32, 32)) for rows in (96, 32))
    table = kernel_times.kernel_table(query, [joins, alone], timer)
    assert done["joins"] == [("joins", 160)] and done["dense"] == [("dense", 32)]
    assert done["alone"] == [("alone", 96), ("alone", 32), ("alone", 32)]
    assert kernel_times.kernel_table(key, [joins, alone], fail) is table and "96+32+32x256" in table.key.layer
    assert "96+32+32x256" in table.key.path.name


def test_under_autocast_the_dense_layer_is_the_one_that_runs() -> None:
    timer = Timer(dense=1, slow=1)
    kernel_times.kernel_table(LAYER, [SLOW], timer)
    assert timer.dtypes == {"dense": torch.float32, "slow": torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kernel_times.kernel_table(LAYER, [SLOW], timer)  # another table
    assert timer.dtypes == {"dense": torch.bfloat16, "slow": torch.bfloat16}


def test_a_cache_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning):
        assert kernel_times.kernel_table(LAYER, [SLOW], Timer(dense=10, slow=5)).choose() is not None


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (kernel("wrong", linear=forget_zeros), "off by"),
        (kernel("nan", linear=return_nan), "off by nan"),
        (kernel("broken", __init__=fail), "nvcc: command not found"),
    ],
)
def test_a_kernel_that_fails_is_struck_with_one_warning(
    bad: type[PackedWeight], why: str, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    for layer in (LAYER, replace(LAYER, in_features=512)):
        table = kernel_times.kernel_table(layer, [bad, SLOW], Timer(dense=10, slow=5))
        assert list(table.kernels) == ["slow"]
    (warning,) = recwarn.list
    assert f"kernel {bad.name!r} is left out of the choice" in str(warning.message) and why in str(warning.message)
    assert not (tmp_path / "spec_trl").exists()  # the next process tries it again


def test_a_kernel_that_stores_rows_in_the_wrong_place_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "FILL", 64 * 256)
    assert [first for first, _ in kernel_times.random_rows(ReferenceInt4(LAYER))] == [0, 64]
    assert "slow" in kernel_times.measure(LAYER, [SLOW], Timer(dense=1, slow=1)).kernels
    misplaced = kernel("misplaced", pack_=lambda packed, first_row, rows: ReferenceInt4.pack_(packed, 0, rows))
    with pytest.warns(UserWarning, match="misplaced"):
        assert not kernel_times.measure(LAYER, [misplaced], Timer(dense=1)).kernels


def test_too_little_memory_takes_a_kernel_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(kernel_times, "measure", full)
    with pytest.warns(UserWarning, match="too little memory"):
        choice = kernel_times.choose_measured(LAYER, [SLOW])
    assert choice == KernelChoice("slow", kernel_times.MOST_ROWS)


FIRST, SECOND = on_gpu("first"), on_gpu("second")


def test_the_choice_on_a_gpu_goes_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ("FAST_KERNELS", "KERNELS"):
        monkeypatch.setattr(kernel_choice, names, (FIRST, SECOND))
    layer = layer_spec(96, device="cuda")
    for first, second, expected, max_rows in ((3, 2, SECOND, 29), (3, 4, FIRST, 64), (10, 10, None, 0)):
        times = {"first": dict.fromkeys(ROWS, first), "second": dict.fromkeys(ROWS, second) | {32: 11}}
        table = KernelTable(TableKey("GPU", "torch", "96x256", "first, second"), dict.fromkeys(ROWS, 10), times)
        monkeypatch.setattr(kernel_times, "kernel_table", lambda layer, kernels, table=table: table)
        found, packed = find_kernel("auto", layer), make_packed("auto", layer)
        if expected is None:
            assert found == packed == "no kernel was measured to be faster than the dense layer"
        else:
            assert found is expected and type(packed) is expected and packed.max_rows == max_rows
    monkeypatch.setattr(kernel_times, "kernel_table", None)  # named: no table is asked for
    packed = make_packed("second", layer)
    assert type(packed) is find_kernel("second", layer) is SECOND and packed.max_rows == sys.maxsize


def test_auto_on_a_cpu_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "kernel_table", None)
    packed = make_packed("auto", LAYER)
    assert type(packed) is TorchInt4Cpu and packed.max_rows == TorchInt4Cpu(LAYER).max_rows


# ---- the choice by a table, and its file ----------------------------------------------------------------------------


EARLIER = (1, 2, 4, 8, 16, 32, 64)  # rows in tables of earlier releases, which stay valid


def times(*microseconds: float) -> dict[int, float]:
    rows = ROWS if len(microseconds) == len(ROWS) else EARLIER
    return {count: m * 1e-6 for count, m in zip(rows, microseconds, strict=True)}


DENSE = times(10, 10, 10, 10, 10, 12, 14)


def table(**kernels: dict[int, float]) -> KernelTable:
    dense = next(({rows: DENSE[rows] for rows in own} for own in kernels.values()), DENSE)
    return KernelTable(KEY, dense, kernels)


@pytest.mark.parametrize(
    ("kernels", "choice"),
    [
        # The fastest with few rows wins, though it ends earlier.
        (dict(few=times(3, 4, 40), many=times(5, 5, 5)), ("few", 12)),
        # Beyond one row it is not used, so 100 costs nothing: it counts as dense there.
        (dict(small=times(2, 100, 100), all=times(5, 5, 5)), ("small", 1)),
        (dict(one=times(2, 20, 20), all=times(4, 4, 4)), ("all", 64)),
        # The line goes on after 32 rows, to the dense layer's time or to 64 rows.
        (dict(rises=times(3, 3, 10)), ("rises", 41)),
        (dict(follows=times(3, 3, 5)), ("follows", 64)),
        # Earlier tables: a tie goes to the one that lasts longer; the limit is the last before the first defeat.
        (dict(short=times(3, 3, 3, 3, 20, 3, 3), long=times(3, 3, 3, 3, 9, 20, 3)), ("long", 17)),
        (dict(a=times(3, 3, 11, 3, 3, 3, 3)), ("a", 3)),
        # As fast as dense is not faster.
        (dict(a=times(10, 10, 12)), None),
        (dict(a=times(11, 1, 1, 1, 1, 1, 1)), None),
        ({}, None),
    ],
)
def test_choice(kernels: dict[str, dict[int, float]], choice: tuple[str, int] | None) -> None:
    assert table(**kernels).choose() == (None if choice is None else KernelChoice(*choice))


def test_what_is_saved_is_read_again() -> None:
    saved = table(a=times(1, 2, 3, 4, 5, 6, 7))
    with pytest.raises(FileNotFoundError):
        KernelTable.load(KEY)
    saved.save()
    assert KernelTable.load(KEY) == saved
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
        ("0.000012", "0.0"), ("0.000012", "NaN"), ('"32"', '"33"'), ('"version": 1', '"version": 2'), ("{", "")
    ):  # fmt: skip
        assert part in text
        KEY.path.write_text(text.replace(part, damaged))
        with pytest.raises(ValueError, match=r"json is not a valid table of kernels: .*it is measured again"):
            KernelTable.load(KEY)


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_TRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KEY.path.parent == tmp_path / "spec_trl/kernels"
