"""The ledger of what rounds take."""

from spec_trl.scheduling.ledger import Kind, Times


def test_rounds_of_a_kind_that_was_never_seen_take_what_is_predicted() -> None:
    """As a rollout's last autoregressive rounds, of fewer rows than any so far."""
    assert Times(0.3).seconds(Kind((), (0,), 1), 2.0) == 2.0
