"""When a drafter learns with a fixed stride."""

import pytest

from spec_trl.generation.drafters.tts.stride import UpdateStride


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_the_first_round_and_every_sth_after_it(rounds: int) -> None:
    stride = UpdateStride(rounds)
    for _ in range(2):
        assert [i for i in range(40) if stride.is_due()] == list(range(0, 40, rounds))
        stride.begin()
