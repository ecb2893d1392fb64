"""The line through measured times."""

import random

import numpy as np
import pytest

from spec_trl.scheduling.forward_seconds import fit_affine


def test_a_line_is_that_of_least_squares() -> None:
    draw = random.Random(0)
    for _ in range(50):
        times = [(draw.randint(1, 64), 1.0 + draw.random(), 0.5 + draw.random()) for _ in range(6)] + [(100, 2.5, 1.0)]
        line = fit_affine(times)
        batches, seconds, weights = zip(*times, strict=True)
        slope, fixed = np.polyfit(batches, seconds, 1, w=np.sqrt(weights))
        assert (line.per_request, line.fixed) == pytest.approx((slope, fixed))


@pytest.mark.parametrize(
    ("times", "line"),
    [
        ([(4, 2.0)], (0.0, 2.0)),
        ([(1, 3.0), (2, 1.0)], (0.0, 2.0)),  # it would fall
        ([(1, 1.0), (2, 5.0)], (11 / 5, 0.0)),  # it would begin below 0
    ],
)
def test_times_that_no_forward_can_have(times: list[tuple[int, float]], line: tuple[float, float]) -> None:
    found = fit_affine([(batch, seconds, 1.0) for batch, seconds in times])
    assert (found.per_request, found.fixed) == pytest.approx(line)


def test_no_times() -> None:
    with pytest.raises(ValueError, match="times is empty"):
        fit_affine([])
