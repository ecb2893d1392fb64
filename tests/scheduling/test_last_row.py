"""Rows of different acceptance: when the last one has ended."""

import pytest

from spec_trl.scheduling.last_row import until_last_row


TAUS = [[1.0, 4.0], [2.0, 2.0, 4.0], [1.5, 3.0, 4.5, 2.5], [3.0]]


@pytest.mark.parametrize("taus", TAUS)
def test_between_the_smallest_and_the_harmonic_mean(taus: list[float]) -> None:
    assert until_last_row(taus, lambda batch: 7.0) == pytest.approx(min(taus))
    harmonic = len(taus) / sum(1 / tau for tau in taus)
    assert until_last_row(taus, lambda batch: 2.0 * batch) == pytest.approx(harmonic)
    assert min(taus) <= until_last_row(taus, lambda batch: 1.0 + batch) <= harmonic


def test_by_hand() -> None:
    """A quarter of the rounds has two rows, at 3 s; the others have one, at 2 s."""
    assert until_last_row([1.0, 4.0], lambda batch: 1.0 + batch) == pytest.approx(3 / (0.25 * 3 + 0.75 * 2))


def test_rows_that_are_all_alike_have_their_own() -> None:
    assert until_last_row([3.0] * 4, lambda batch: batch**0.5) == pytest.approx(3.0)
