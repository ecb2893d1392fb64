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


def test_adaptive() -> None:
    stride = UpdateStride(None)
    start = STRIDES.index(stride.rounds)
    for block_efficiency, at in (
        (4.0, start),  # nothing to compare with
        (4.0 * (1 - 2 * CHANGE), start - 1),
        (4.0, start - 1),  # it rose
        (4.0, start),
        (4.0 * (1 - CHANGE / 2), start + 1),  # within what counts as level
    ):
        due_rounds(stride, WINDOW, block_efficiency)
        assert stride.rounds == STRIDES[at]
    due_rounds(stride, 20 * WINDOW)  # it stays on its ladder
    assert stride.rounds == STRIDES[-1]
    for fall in range(20):
        due_rounds(stride, WINDOW, 3.0 * (1 - 2 * CHANGE) ** fall)
    assert stride.rounds == STRIDES[0] == 1
    due_rounds(stride, 10 * WINDOW + 1, 9.0)
    assert stride.rounds == STRIDES[-1]
    stride.begin()
    assert stride.rounds == STRIDES[start] and stride.is_due()
