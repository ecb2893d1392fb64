"""Rollouts beside the autoregressive decoding of as many tokens."""

import pytest

from spec_trl.scheduling.delivery import LEAST_TOKENS, RolloutWatch


def plain_seconds(rows: int, length: float) -> float:
    """Of an autoregressive round; none here is longer than the mean of what lies ahead."""
    return rows + length / 1000


def test_the_rest_of_the_rollout_beside_plain_decoding() -> None:
    """Candidate 1 drafts from the third round on, when rows 7 and 8 have two tokens each; 8 ends after one more round,
    with five accepted drafts, and 7 gets three tokens in each of 12 rounds."""
    watch = RolloutWatch()
    for _ in range(2):
        watch.record([7, 8], {}, 100.0, 1.0)
    watch.open(1, [7, 8], 50.0)
    watch.record([7, 8], {1: [2, 5], 0: [0, -1]}, 4.0, 2.0)
    for _ in range(11):
        watch.record([7], {1: [1], 0: [2]}, 3.0, 1.0)
    (delivery,) = watch.deliveries(plain_seconds)
    assert (delivery.which, delivery.requests, delivery.length) == (1, [7, 8], 50.0)
    length = 50 + (36 + 6) / 2 / 2
    plain = 6 * plain_seconds(2, length) + 30 * plain_seconds(1, length)
    assert delivery.speedup == pytest.approx(plain / (4 + 11 * 3))


def test_each_opening_has_its_own_rest_and_late_ones_tell_nothing() -> None:
    watch, rounds = RolloutWatch(), 2 * LEAST_TOKENS
    for number in range(rounds):
        if number in (0, LEAST_TOKENS, LEAST_TOKENS + 1):
            watch.open(number, [0], 10.0)
        watch.record([0], {}, 1.0 if number < LEAST_TOKENS else 3.0, 1.0)
    found = {delivery.which: delivery.speedup for delivery in watch.deliveries(lambda rows, length: 2.0)}
    assert found == {0: pytest.approx(1.0), LEAST_TOKENS: pytest.approx(2 / 3)}


def test_a_round_that_took_far_longer_is_no_verdict() -> None:
    """Three rounds in which forwards were captured count as three times what rounds usually take."""
    watch = RolloutWatch()
    watch.open(0, [0], 10.0)
    for number in range(20):
        watch.record([0], {0: [1]}, 60.0 if number < 3 else 1.5, 1.0)
    (delivery,) = watch.deliveries(lambda rows, length: 1.0)
    assert delivery.speedup == pytest.approx(40 / (3 * 4.5 + 17 * 1.5))


def test_nothing_opened_nothing_delivered() -> None:
    watch = RolloutWatch()
    watch.record([0], {}, 1.0, 1.0)
    assert not list(watch.deliveries(plain_seconds))
