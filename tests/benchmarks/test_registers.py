"""The table of what kernels take: it misses none, and says what is wrong."""

from pathlib import Path

import spec_trl
from benchmarks.gpu.registers import faults, launched, table


def test_a_kernel_that_spills_or_is_missing_is_a_fault() -> None:
    rows = [(90, "one", 1024, 0, 40, "bf16"), (90, "one", 2048, 0, 36, "bf16"), (120, "two", 0, 0, 255, "fp32")]
    assert not faults(rows, {"one", "two"})
    assert table(rows)["one: bf16"] == {"9.0": "40 registers, 0 B spilled, 2.0 of 227 KiB shared"}
    wrong = [(100, "one", 0, 8, 255, "bf16"), (120, "one", 100 << 10, 0, 40, "bf16")]
    assert faults(wrong, {"one", "other"}) == [
        "no test compiles other",
        "one (bf16) for 10.0 spills 8 bytes",
        "one (bf16) for 12.0 takes 102400 bytes of shared memory",
    ]


def test_launched_kernels_are_found() -> None:
    """Those of both folders, and no function that kernels call."""
    found = launched(Path(spec_trl.__file__).parent)
    assert {"_attend", "_merge", "_draw_chunk", "_narrow", "_int4_mm", "_scan"} <= found and "_gumbel" not in found
