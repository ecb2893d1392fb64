"""Two rates, of a chain's first token and of the further ones: what τ follows from them, and how they are counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.scheduling.acceptance import Acceptance, AcceptanceCounts
from spec_trl.scheduling.draft_length import expected_block_efficiency


RATES = st.floats(0, 1)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(RATES, RATES, st.integers(0, 64))
def test_block_efficiency(first: float, further: float, draft_length: int) -> None:
    """One rate for all positions is the geometric model; τ grows with the draft, within 1 to γ + 1."""
    geometric = Acceptance.geometric(first).block_efficiency(draft_length)
    assert geometric == pytest.approx(expected_block_efficiency(first, draft_length))
    efficiencies = [Acceptance(first, further).block_efficiency(gamma) for gamma in range(20)]
    assert efficiencies == sorted(efficiencies)
    assert all(1 <= tau <= gamma + 1 + 1e-9 for gamma, tau in enumerate(efficiencies))


@pytest.mark.parametrize(
    ("first", "further", "draft_length", "expected"),
    [
        (0.5, 0.8, 3, 1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.64),
        (0.5, 0.8, 1, 1.5),  # γ = 1 has no further token
        (0.0, 1.0, 5, 1.0),  # none is reached
        (0.25, 1.0, 8, 3.0),
        (0.7, 0.4, 0, 1.0),
    ],
)
def test_block_efficiency_by_hand(first: float, further: float, draft_length: int, expected: float) -> None:
    assert Acceptance(first, further).block_efficiency(draft_length) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("accepted", "attempted", "expected"),
    [
        (0, 0, (0, 0, 0, 0)),
        (0, 1, (0, 1, 0, 0)),  # nothing after a first token that was refused had a verdict
        (1, 1, (1, 1, 0, 0)),
        (1, 2, (1, 1, 0, 1)),
        (4, 5, (1, 1, 3, 4)),
        (4, 4, (1, 1, 3, 3)),
    ],
)
def test_a_round_by_hand(accepted: int, attempted: int, expected: tuple[int, ...]) -> None:
    counts = AcceptanceCounts.of_round(accepted, attempted)
    assert (counts.first_accepted, counts.first, counts.further_accepted, counts.further) == expected


def test_sums_fading_and_expected_counts() -> None:
    counts = AcceptanceCounts(1, 2, 3, 4)
    counts.add(AcceptanceCounts(10, 20, 30, 40))
    assert counts == AcceptanceCounts(11, 22, 33, 44)
    counts.add(AcceptanceCounts(1, 1, 1, 1), decay=0.5)  # the new ones weigh all they do
    assert counts == AcceptanceCounts(6.5, 12, 17.5, 23)
    counts.fade(0.5)
    assert counts == AcceptanceCounts(3.25, 6, 8.75, 11.5)
    counts = AcceptanceCounts.expecting(Acceptance(0.6, 0.2), 5.0)
    assert counts == AcceptanceCounts(3.0, 5.0, 1.0, 5.0)


def test_rates_are_drawn_towards_the_prior_each_by_its_own_evidence() -> None:
    prior = Acceptance(0.6, 0.2)
    assert AcceptanceCounts().rates(prior, 3.0) == pytest.approx(prior)
    rates = AcceptanceCounts(8, 10, 0, 0).rates(prior, 10.0)
    assert rates == pytest.approx((0.7, 0.2))  # nothing was heard of further ones
    assert AcceptanceCounts(8, 10, 45, 90).rates(prior, 10.0) == pytest.approx((0.7, 0.47))
