"""What rollouts delivered next to the autoregressive decoding of as many tokens, and what is expected after it."""

import pytest

from spec_trl.scheduling.delivery import LEAST_TOKENS, RolloutWatch
from spec_trl.scheduling.selection import MOST_DELIVERED, AcceptanceHistory, Selection
from tests.scheduling.machine import at, history_of
from tests.scheduling.test_selection import LADDER, METHODS, methods_of


def plain_seconds(rows: int, length: float) -> float:
    """Of an autoregressive round."""
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
    watch.forget()
    for _ in range(rounds):  # of which none drafts
        watch.record([0], {}, 1.0, 1.0)
    assert not list(watch.deliveries(plain_seconds))


def test_a_round_that_took_far_longer_is_no_verdict() -> None:
    """Three rounds in which forwards were captured count as three times what rounds usually take."""
    watch = RolloutWatch()
    watch.open(0, [0], 10.0)
    for number in range(20):
        watch.record([0], {0: [1]}, 60.0 if number < 3 else 1.5, 1.0)
    (delivery,) = watch.deliveries(lambda rows, length: 1.0)
    assert delivery.speedup == pytest.approx(40 / (3 * 4.5 + 17 * 1.5))


# ---- what is expected after it --------------------------------------------------------------------------------


def test_delivered_is_the_mean_of_rollouts_and_fades_with_the_last_of_them() -> None:
    history = AcceptanceHistory(decay=0.5)
    assert history.delivered("self", 4, False) == 1.0
    history.record_delivery("self", 4, False, 0.9, 1.8)
    assert history.delivered("self", 4, False) == pytest.approx(0.5)
    history.record_delivery("self", 4, False, 0.5, 4.0)
    assert history.delivered("self", 4, False) == pytest.approx(0.25)
    others = (("self", 16, False), ("ngram", 4, False), ("self", 4, True))
    assert [history.delivered(*other) for other in others] == [1.0] * 3
    history.end_rollout()
    assert history.delivered("self", 4, False) == pytest.approx(0.25)  # of two rollouts: one is still near
    history.end_rollout()
    assert history.delivered("self", 4, False) == pytest.approx(0.5)


def test_a_rescue_is_little_credit() -> None:
    """Others take over from a method that is expected to lose."""
    for measured, credit in ((2.1, MOST_DELIVERED), (1.0, 1.0)):
        history = AcceptanceHistory()
        history.record_delivery("ngram", 4, False, measured, 0.6)
        assert history.delivered("ngram", 4, False) == 1.0
        history.record_delivery("ngram", 4, False, 0.9, 1.8)
        assert history.delivered("ngram", 4, False) == pytest.approx((0.5 * credit) ** 0.5)


def test_what_was_not_delivered_is_not_expected() -> None:
    history, prompts = history_of(ngram=0.5, self=0.75, model=0.05), ["x", "y"]

    def chosen(in_flight: int = 2) -> list[str]:
        selection = Selection(LADDER, history, prompts, in_flight, METHODS, races=True)
        return [choice.method for choice in (selection.common, *selection.per_prompt())]

    assert chosen() == ["ngram"] * 3
    history.record_delivery("ngram", LADDER.profiled_batch(2), True, 0.9, 1.6)
    assert chosen() == ["ngram"] * 3  # that was where nobody could help
    history.record_delivery("ngram", LADDER.profiled_batch(2), False, 0.9, 1.6)
    assert chosen() == ["self"] * 3
    assert chosen(1) == ["ngram"] * 3  # one waits
    history.record_delivery("self", LADDER.profiled_batch(2), False, 0.9, 1.6)
    assert chosen() == ["none"] * 3


def test_a_prompts_own_method_needs_to_deliver() -> None:
    history, keys = history_of(ngram=0.05, self=0.8, model=0.05), ["copy", "x", "y", "z"]
    history.record("ngram", "copy", at(0.95, 10**4))
    assert methods_of(history, keys, 4) == ["ngram", "self", "self", "self"]
    history.record_delivery("ngram", 16, True, 1.35, 3.0)
    assert methods_of(history, keys, 4) == ["self"] * 4
    history.record_delivery("self", 16, True, 1.28, 1.6)  # nor does that one
    assert methods_of(history, keys, 4) == ["ngram", "self", "self", "self"]


def test_no_prompt_leaves_a_common_method_for_what_it_did_not_deliver() -> None:
    """Rows with methods of their own may lack it as well, and those have no record."""
    history, keys = history_of(ngram=0.2, self=0.8, model=0.05), ["slow", "x", "y", "z"]
    for method, rate in (("self", 0.66), ("ngram", 0.1)):
        history.record(method, "slow", at(rate, 10**4))
    assert methods_of(history, keys, 4) == ["self"] * 4
    history.record_delivery("self", 16, False, 1.45, 1.6)
    assert methods_of(history, keys, 4) == ["self"] * 4
