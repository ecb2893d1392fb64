"""Measuring kernels with invented times: what is timed, what is kept, and what becomes of a kernel that fails."""

import sys

import pytest
import torch

from spec_trl.quantization import kernels as kernel_choice
from spec_trl.quantization.kernels import LayerSpec, find_kernel, kernel_times, make_packed
from spec_trl.quantization.kernels.base import Package
from spec_trl.quantization.kernels.kernel_table import ROWS, KernelTable, TableKey
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.kernels.torch_int4 import TorchInt4Cpu


LAYER = LayerSpec(96, 256, 4, 128, torch.float32, torch.bfloat16, torch.device("cpu"))


class Slow(ReferenceInt4):
    name = "slow"


class Wrong(ReferenceInt4):
    """Forgets the zero points of one row."""

    name = "wrong"

    def linear(self, x):
        self.zeros[77] = 0
        return super().linear(x)


class Nan(ReferenceInt4):
    name = "nan"

    def linear(self, x):
        y = super().linear(x)
        y[-1, 5] = torch.nan
        return y


class Broken(ReferenceInt4):
    name = "broken"

    def __init__(self, layer):
        raise RuntimeError("nvcc: command not found")


class Timer:
    """Invented seconds by kernel; remembers what was timed, and runs a call."""

    def __init__(self, **microseconds):
        self.microseconds = microseconds
        self.timed = []

    def __call__(self, name, rows, calls):
        self.timed.append((name, rows))
        assert len(calls) >= kernel_times.MIN_CALLS
        assert calls[0]().shape == (rows, LAYER.out_features)
        return self.microseconds[name] * 1e-6 * (1 if rows <= 8 else 4)


def new_process(monkeypatch):
    monkeypatch.setattr(kernel_times, "tables", {})
    monkeypatch.setattr(kernel_times, "failed_kernels", set())


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    new_process(monkeypatch)
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))


def test_every_kernel_and_the_dense_layer_are_timed():
    timer = Timer(dense=10, torch_int4=3, slow=5)
    table = kernel_times.kernel_table(LAYER, [Slow, TorchInt4Cpu], timer)
    assert timer.timed == [(name, rows) for name in ("dense", "slow", "torch_int4") for rows in ROWS]
    assert table.kernels["slow"][64] == pytest.approx(20e-6)
    choice = table.choose()
    assert choice is not None and choice.kernel == "torch_int4"


def test_a_table_is_measured_once_and_kept_for_the_next_process(monkeypatch):
    timer = Timer(dense=10, slow=5)
    table = kernel_times.kernel_table(LAYER, [Slow], timer)
    count = len(timer.timed)
    assert kernel_times.kernel_table(LAYER, [Slow], timer) is table and len(timer.timed) == count
    new_process(monkeypatch)
    assert kernel_times.kernel_table(LAYER, [Slow], timer) == table and len(timer.timed) == count
    kernel_times.kernel_table(LAYER, [Slow, ReferenceInt4], Timer(dense=1, slow=1, reference=1))  # another table


def test_other_software_means_another_table(monkeypatch):
    kernel_times.kernel_table(LAYER, [Slow], Timer(dense=10, slow=5))
    monkeypatch.setattr(Slow, "package", Package("torch", "torch", "torch"))
    timer = Timer(dense=10, slow=7)
    assert kernel_times.kernel_table(LAYER, [Slow], timer).kernels["slow"][1] == pytest.approx(7e-6)
    assert timer.timed


def test_under_autocast_the_dense_layer_is_the_one_that_runs():
    seen = {}

    def timer(name, rows, calls):
        seen[name] = calls[0]().dtype
        return 1e-6

    kernel_times.kernel_table(LAYER, [Slow], timer)
    assert seen == {"dense": torch.float32, "slow": torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kernel_times.kernel_table(LAYER, [Slow], timer)  # another table
    assert seen == {"dense": torch.bfloat16, "slow": torch.bfloat16}


def test_a_damaged_file_is_measured_again(monkeypatch, tmp_path):
    kernel_times.kernel_table(LAYER, [Slow], Timer(dense=10, slow=5))
    (path,) = (tmp_path / "spec_trl" / "kernels").iterdir()
    path.write_text("{")
    new_process(monkeypatch)
    with pytest.warns(UserWarning, match="measured again: .* is not a valid table of kernels"):
        table = kernel_times.kernel_table(LAYER, [Slow], Timer(dense=10, slow=6))
    assert table.kernels["slow"][1] == pytest.approx(6e-6)


def test_a_cache_that_cannot_be_written_stops_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning):
        table = kernel_times.kernel_table(LAYER, [Slow], Timer(dense=10, slow=5))
    assert table.choose() is not None


@pytest.mark.parametrize(
    ("kernel", "why"), [(Wrong, "off by"), (Nan, "off by nan"), (Broken, "nvcc: command not found")]
)
def test_a_kernel_that_fails_is_struck_with_one_warning(kernel, why, recwarn, tmp_path):
    timer = Timer(dense=10, slow=5)
    table = kernel_times.kernel_table(LAYER, [kernel, Slow], timer)
    assert list(table.kernels) == ["slow"]
    wider = LayerSpec(96, 512, 4, 128, torch.float32, torch.bfloat16, torch.device("cpu"))
    assert list(kernel_times.kernel_table(wider, [kernel, Slow], timer).kernels) == ["slow"]
    (warning,) = recwarn.list
    assert f"kernel {kernel.name!r} is left out of the choice" in str(warning.message) and why in str(warning.message)
    assert not (tmp_path / "spec_trl").exists()  # the next process tries it again


def test_the_random_weight_is_what_the_check_expects():
    """Blocks of rows included: a kernel that stores them in the wrong place is found out."""

    class Misplaced(ReferenceInt4):
        name = "misplaced"

        def pack_(self, first_row, rows):
            super().pack_(0, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_times, "FILL", 64 * 256)
        assert [first for first, _ in kernel_times.random_rows(ReferenceInt4(LAYER))] == [0, 64]
        assert "reference" in kernel_times.measure(LAYER, [ReferenceInt4], Timer(dense=1, reference=1)).kernels
        with pytest.warns(UserWarning, match="misplaced"):
            assert not kernel_times.measure(LAYER, [Misplaced], Timer(dense=1)).kernels


def test_too_little_memory_takes_a_kernel_unmeasured(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(kernel_times, "measure", full)
    with pytest.warns(UserWarning, match="too little memory"):
        choice = kernel_times.choose_measured(LAYER, [Slow])
    assert choice is not None and choice.kernel == "slow"


class OnGpu(ReferenceInt4):
    """Stands for a kernel for GPUs, but lives where the test does."""

    name = "first"
    device_type = "cuda"

    @classmethod
    def unsupported(cls, layer):
        return None

    def __init__(self, layer):
        super().__init__(LAYER)


class AlsoOnGpu(OnGpu):
    name = "second"


def times(first, second, dense=10.0):
    return KernelTable(
        TableKey("GPU", "torch", "96x256", "first, second"),
        dict.fromkeys(ROWS, dense),
        {"first": dict.fromkeys(ROWS, first), "second": dict.fromkeys(ROWS, second) | {32: 11.0}},
    )


@pytest.mark.parametrize(
    ("name", "table", "kernel", "max_rows"),
    [
        ("auto", times(3, 2), AlsoOnGpu, 16),
        ("auto", times(3, 4), OnGpu, 64),
        ("second", None, AlsoOnGpu, sys.maxsize),  # named: no table is asked for
        ("auto", times(10, 10), None, 0),
    ],
)
def test_the_choice_on_a_gpu_goes_by_the_table(monkeypatch, name, table, kernel, max_rows):
    monkeypatch.setattr(kernel_choice, "FAST_KERNELS", (OnGpu, AlsoOnGpu))
    monkeypatch.setattr(kernel_choice, "KERNELS", (OnGpu, AlsoOnGpu))
    monkeypatch.setattr(kernel_times, "kernel_table", table and (lambda layer, kernels: table))
    layer = LayerSpec(96, 256, 4, 128, torch.float32, None, torch.device("cuda"))
    found, packed = find_kernel(name, layer), make_packed(name, layer)
    if kernel is None:
        assert found == packed == "no kernel was measured to be faster than the dense layer"
    else:
        assert found is kernel and type(packed) is kernel and packed.max_rows == max_rows


def test_auto_on_a_cpu_measures_nothing(monkeypatch):
    monkeypatch.setattr(kernel_times, "kernel_table", None)
    packed = make_packed("auto", LAYER)
    assert type(packed) is TorchInt4Cpu and packed.max_rows == TorchInt4Cpu(LAYER).max_rows
