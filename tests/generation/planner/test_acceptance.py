"""Two rates, of a chain's first token and of the further ones: what τ follows from them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.generation.planner.acceptance import Acceptance, acceptance_of, expected_block_efficiency


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


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.floats(0, 1), st.integers(1, 16))
def test_acceptance_inverts_block_efficiency(acceptance: float, draft_length: int) -> None:
    tau = expected_block_efficiency(acceptance, draft_length)
    assert expected_block_efficiency(acceptance_of(tau, draft_length), draft_length) == pytest.approx(tau)
    assert acceptance_of(draft_length + 4.0, draft_length) == pytest.approx(1.0)  # outside the possible range
    assert acceptance_of(0.5, draft_length) == pytest.approx(0.0, abs=1e-9)
