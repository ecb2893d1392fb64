"""The TTS benchmark: bins, intervals, and tiny runs. No test looks at a time."""


import pytest

from benchmarks.tts_drafters import FROZEN, NONE, TTS
from benchmarks.tts_report import (
    THIRDS,
    Record,
    by_depth,
    gain_interval,
    speed_ratio,
    summarise,
)


def record(blocks: int, committed: int, seconds: float = 1.0, where: int = 0) -> Record:
    counts = [[0] * len(THIRDS), [0] * len(THIRDS)]
    counts[0][where], counts[1][where] = blocks, committed
    facts = {"differ": 0, "same": committed, "tokens": committed, "is_batch": False}
    return {"blocks": counts[0], "committed": counts[1], "seconds": seconds} | facts


def test_rounds_are_counted_where_they_began() -> None:
    rounds = [2, 1, 5, 2, 9, 1]  # begin at 1, 3, 4, 9, 11, 20
    assert by_depth(rounds, 21) == ([3, 2, 0], [8, 11, 0])  # the last token alone is no block
    assert by_depth(rounds, 36) == ([5, 1, 0], [19, 1, 0])
    assert sum(by_depth([1] * 41, 42)[0]) == 40


def test_gain_and_speed_are_compared_within_requests() -> None:
    # Requests differ a lot, the gain is 20 % in each: an unpaired bootstrap would be wide.
    frozen = [record(100 * i, 200 * i) for i in range(1, 9)]
    other = [record(100 * i, 240 * i) for i in range(1, 9)]
    assert gain_interval(frozen, other) == pytest.approx((0.2, 0.2)) and gain_interval(frozen[:1], other[:1]) is None
    mixed = [record(100, 300 if i % 2 else 200) for i in range(8)]
    low, high = gain_interval([record(100, 200)] * 8, mixed)  # type: ignore[misc]
    assert 0.0 <= low < 0.1 and 0.4 < high <= 0.5
    frozen = [record(1, 1, seconds) for seconds in (1.0, 10.0, 4.0)]
    for first, ratio in ((2.0, 1.0), (0.5, 2.0)):
        assert speed_ratio(frozen, [record(1, 1, seconds) for seconds in (first, 5.0, 4.0)]) == ratio


def test_requests_of_a_batch_are_resampled_one_by_one() -> None:
    def batch(committed: list[int]) -> Record:
        counts = {"blocks": [10] * len(committed), "committed": committed, "is_batch": True}
        return record(0, sum(committed)) | counts

    cells = [{NONE: record(0, 1), FROZEN: batch([20, 20]), TTS: batch([20, 40])}]
    row = summarise({("eagle3", 1.0): cells}, 0)[-1]
    assert row["gain"] == 0.5 and row["interval"] == (0.0, 1.0)
