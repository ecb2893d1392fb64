"""How ranks share rollouts: order, first requests, rows that move; and the line through measured times."""

import random
from itertools import pairwise

import numpy as np
import pytest

from spec_trl.distributed.shared_work import (
    ExpectedLengths,
    MoveCosts,
    dealt,
    dealt_to_holders,
    longest_first,
    measured_send_seconds,
    rows_to_give,
    step_seconds,
)
from spec_trl.generation.planner.clock import AffineSeconds, fit_affine


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_holders_are_dealt_what_they_hold(ranks: int) -> None:
    order = [[2 * index, 2 * index + 1] for index in range(9)]
    holders = {index: index // 2 % ranks for index in range(18) if index // 2 != 8}  # no rank holds one group
    arranged = dealt_to_holders(order, holders, ranks, rounds=2)
    assert sorted(arranged) == order and dealt_to_holders(order, {}, ranks, rounds=2) == order
    for rank in range(ranks):
        assert all(holders[first] == rank for first, _ in dealt(arranged, rank, ranks, rounds=2))


def test_what_no_rank_has_rows_for_comes_later() -> None:
    assert dealt_to_holders([[0], [1], [2], [3]], dict.fromkeys(range(4), 1), 2, 1) == [[1], [0], [2], [3]]


def line(fixed: float, per_row: float) -> AffineSeconds:
    """Rounds of one token per row."""
    return step_seconds((batch, batch, fixed + per_row * batch) for batch in (1, 4, 16))


def test_head_and_tail_take_equally_long() -> None:
    costs = MoveCosts(compute=0.003, send=0.001)
    assert costs.head_share * 0.003 == pytest.approx((1 - costs.head_share) * 0.001) == costs.seconds(1)
    assert MoveCosts(0.003, None).head_share == 0.5
    assert MoveCosts(0.003, 0.0).head_share == 0.0  # sending is free


def test_what_sending_took_is_measured_by_waiting() -> None:
    assert measured_send_seconds(100, computing=2.0, waiting=3.0) == 0.05
    assert measured_send_seconds(100, computing=2.0, waiting=0.001) == 0.01  # at most that: the next move tells
    assert measured_send_seconds(0, computing=2.0, waiting=0.0) is None
    # Where sending is faster than is thought, further moves find out.
    sent, true = 0.5, 0.001
    for _ in range(20):
        share = MoveCosts(0.003, sent).head_share
        computing, sending = 100 * share * 0.003, 100 * (1 - share) * true
        sent = measured_send_seconds(round(100 * (1 - share)), computing, max(sending - computing, 0.0)) or 0.0
    assert sent == pytest.approx(true, rel=0.6)


def test_steps_are_a_line_over_the_batch() -> None:
    steps = line(0.02, 0.003)
    assert [steps(batch) for batch in (2, 8, 32)] == pytest.approx([0.026, 0.044, 0.116])
    # Drafts commit more than a token per row: a step is what one of them takes.
    assert step_seconds([(4, 12, 0.3)])(4) == pytest.approx(0.1)
    one = step_seconds([(8, 8, 0.1)] * 3)  # of one batch alone nothing is known about others
    assert one(8) == one(1) == pytest.approx(0.1)
    assert step_seconds([(1, 1, 0.5), (8, 8, 0.1)])(4) > 0  # noise: less for more rows
    assert line(-0.01, 0.02)(1) > 0


def test_half_the_rows_go_where_each_row_costs() -> None:
    lengths = sorted(range(100, 132))
    assert rows_to_give(lengths, 1000, line(0.0, 0.01), MoveCosts(1e-6, 1e-6)) == 16
    counts = [rows_to_give(lengths, 1000, line(0.0, 0.01), MoveCosts(cost, cost)) for cost in (1e-6, 1e-2, 0.1, 10)]
    assert all(more >= less for more, less in pairwise(counts)) and counts[0] > counts[2] and counts[-1] == 0


def test_none_go_where_rows_are_free_or_about_to_end() -> None:
    lengths = [100] * 8
    assert rows_to_give(lengths, 1000, line(0.02, 0.0), MoveCosts(1e-6, None)) == 0
    assert rows_to_give(lengths, 1000, line(0.02, 1e-6), MoveCosts(1e-9, None)) == 0  # as on a GPU
    assert rows_to_give(lengths, 20, line(0.02, 1e-4), MoveCosts(1e-9, None)) == 0  # 8 ms less, for a round of 20 ms
    assert rows_to_give(lengths, 1, line(0.0, 0.001), MoveCosts(1e-3, None)) == 0
    assert rows_to_give([100], 1000, line(0.0, 0.01), MoveCosts(1e-9, None)) == 0
    assert rows_to_give([], 1000, line(0.0, 0.01), MoveCosts(1e-9, None)) == 0


def test_the_end_is_as_early_as_any_choice_makes_it() -> None:
    lengths, steps, costs = [50, 60, 400, 900, 3000], line(0.01, 0.004), MoveCosts(2e-4, 1e-4)

    def end(count: int) -> float:
        there = costs.seconds(sum(lengths[:count])) + 501 * steps(count) if count else 0.0
        return max((500 + (count > 0)) * steps(len(lengths) - count), there)

    assert end(rows_to_give(lengths, 500, steps, costs)) == min(map(end, range(len(lengths))))


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
