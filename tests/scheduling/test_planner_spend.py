"""What a planner's account pays besides its own trials."""

import pytest

from spec_trl.scheduling.control import NeverSpeculate
from tests.scheduling.test_planner import planner


def test_spends_what_the_account_holds() -> None:
    """In autoregressive rounds, which take a second here."""
    control = planner(2.0)
    control.begin(1, ["a"])
    control.plan([0], 100.0, 0)
    control.budget = 3.0
    assert control.spend(2.0) and control.budget == pytest.approx(1.0)
    assert not control.spend(1.5) and control.budget == pytest.approx(1.0)
    assert control.spend(1.0) and control.budget == pytest.approx(0.0)


def test_without_an_account_all_is_paid() -> None:
    assert NeverSpeculate().spend(1e9)
