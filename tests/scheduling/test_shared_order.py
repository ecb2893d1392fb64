"""The order of a pool, and what each rank begins with."""

import random

import pytest

from spec_trl.scheduling.shared_order import ExpectedLengths, dealt, longest_first


def test_expected_lengths_are_those_of_the_newest_rollout() -> None:
    expected = ExpectedLengths()
    assert expected.of(["a", "b"]) == [0.0, 0.0]
    expected.record({"a": [10, 30], "b": [100]})
    expected.record({"a": [40, 60]})
    assert expected.of(["b", "a", "new", "a"]) == [100.0, 50.0, 75.0, 50.0]


def test_the_longest_come_first_and_copies_stay_together() -> None:
    prompts = ["a", "b", "a", "c", "b"]
    assert longest_first(prompts, [1.0, 5.0, 1.0, 3.0, 5.0], rows=4) == [[1, 4], [3], [0, 2]]
    assert longest_first(prompts, [0.0] * 5, rows=2) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize(("rows", "at_once"), [(8, 8), (16, 8), (12, 4), (4, 4), (5, 1)])
def test_what_is_taken_at_once_fills_a_rank(rows: int, at_once: int) -> None:
    taken = longest_first(["a"] * 8 + ["b"] * 8, [0.0] * 16, rows)
    assert {len(own) for own in taken} == {at_once} and [index for own in taken for index in own] == [*range(16)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_ranks_are_dealt_different_requests(ranks: int, rows: int) -> None:
    order = random.Random(0).sample(range(20), 20)
    hands = [dealt(order, rank, ranks, rows) for rank in range(ranks)]
    together = [index for hand in hands for index in hand]
    assert sorted(together) == sorted(order[: ranks * rows])
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


def test_ranks_begin_with_as_much_work() -> None:
    lengths = sorted((round(1000 / (1 + n)) for n in range(64)), reverse=True)
    hands = [sum(lengths[index] for index in dealt(range(64), rank, 4, 16)) for rank in range(4)]
    in_a_row = [sum(lengths[16 * rank : 16 * rank + 16]) for rank in range(4)]
    assert max(hands) - min(hands) < 0.3 * (max(in_a_row) - min(in_a_row))
