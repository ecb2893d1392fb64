"""What measured rounds teach about a prediction."""

import pytest

from spec_trl.scheduling.correction import MEMORY, OverheadCorrection


def test_nothing_measured_nothing_corrected() -> None:
    assert OverheadCorrection().apply(8, 3.0) == 3.0


def test_the_median_of_the_newest_rounds_counts() -> None:
    correction = OverheadCorrection()
    for seconds in (1.5, 90.0, 1.5):
        correction.record(8, 1.0, seconds)
    assert correction.apply(8, 1.0) == 1.5
    for _ in range(MEMORY):
        correction.record(8, 1.0, 2.0)
    for _ in range(MEMORY // 2 + 1):  # more than half of those that count
        correction.record(8, 1.0, 3.0)
    assert correction.apply(8, 1.0) == 3.0


def test_overhead_is_per_round_and_of_batches_of_like_size() -> None:
    correction = OverheadCorrection()
    correction.record(64, 10.0, 12.0)
    correction.record(1, 1.0, 1.5)
    assert correction.apply(64, 20.0) == 22.0
    assert correction.apply(100, 20.0) == 22.0  # 64 to 127
    assert correction.apply(1, 5.0) == 5.5
    assert correction.apply(2, 5.0) == 5.5  # nearer to 1
    assert correction.apply(32, 5.0) == 7.0  # nearer to 64
    assert correction.apply(1000, 5.0) == 7.0


def test_never_below_a_tenth() -> None:
    correction = OverheadCorrection()
    correction.record(8, 10.0, 1.0)
    assert correction.apply(8, 10.0) == 1.0
    assert correction.apply(8, 2.0) == pytest.approx(0.2)


def test_what_is_known() -> None:
    correction = OverheadCorrection()
    for batch in (8, 12, 15, 64):  # the first three are of one size
        correction.record(batch, 0.0, 1.0)
    assert [correction.knows(batch, 3) for batch in (7, 8, 11, 15, 16)] == [False, True, True, True, False]
    assert [correction.knows(batch, 3, reach=1) for batch in (3, 4, 16, 31, 32, 64)] == [
        False, True, True, True, False, False
    ]  # fmt: skip
    assert correction.batches(3) == [8] and correction.batches(1) == [8, 64] and not correction.is_empty
