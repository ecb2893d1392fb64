"""When a drafter learns."""

import pytest

from spec_trl.generation.drafters.tts.stride import CHANGE, STRIDES, WINDOW, UpdateStride


def due_rounds(stride: UpdateStride, rounds: int, block_efficiency: float = 3.0) -> list[int]:
    found = []
    for index in range(rounds):
        if stride.is_due():
            found.append(index)
        stride.observe(block_efficiency)
    return found


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_fixed(rounds: int) -> None:
    """The first round, and every S-th after it."""
    assert due_rounds(UpdateStride(rounds), 40) == list(range(0, 40, rounds))


def feed(stride: UpdateStride, block_efficiency: float) -> int:
    due_rounds(stride, WINDOW, block_efficiency)
    return stride.rounds


def test_adaptive_falls_level_and_rises() -> None:
    stride = UpdateStride(None)
    start = STRIDES.index(stride.rounds)
    assert feed(stride, 4.0) == STRIDES[start]  # nothing to compare with
    assert feed(stride, 4.0 * (1 - 2 * CHANGE)) == STRIDES[start - 1]
    assert feed(stride, 4.0) == STRIDES[start - 1]  # it rose
    assert feed(stride, 4.0) == STRIDES[start]
    assert feed(stride, 4.0 * (1 - CHANGE / 2)) == STRIDES[start + 1]  # within what counts as level


def test_adaptive_stays_on_its_ladder() -> None:
    stride = UpdateStride(None)
    for _ in range(20):
        feed(stride, 3.0)
    assert stride.rounds == STRIDES[-1]
    value = 3.0
    for _ in range(20):
        value *= 1 - 2 * CHANGE
        feed(stride, value)
    assert stride.rounds == STRIDES[0] == 1


def test_begins_anew() -> None:
    stride = UpdateStride(None)
    for _ in range(10):
        feed(stride, 3.0)
    stride.begin()
    assert stride.rounds == UpdateStride(None).rounds
    assert stride.is_due()
