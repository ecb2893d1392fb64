"""What plain decoding would have taken: its rounds, counted by hand and against a simple loop, and their times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.scheduling.correction import OverheadCorrection
from spec_trl.scheduling.plain_decoding import LEAST_ROUNDS, PlainRounds, plain_rounds, seconds_of


def test_rounds_by_hand() -> None:
    """Rows of 2, 5 and 3 tokens; the fourth request, of 1, waits for the first row to end."""
    found = plain_rounds([10, 20, 30, 40], [2, 5, 3, 1], capacity=3)
    assert found == [
        PlainRounds(2, 3, (10 + 20 + 30) / 3 + 0.5),  # lengths grow by a token per round
        PlainRounds(1, 3, (40 + 22 + 32) / 3),
        PlainRounds(2, 1, 23.5),
    ]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 12),
)
def test_rounds_are_those_of_decoding_round_by_round(
    requests: list[tuple[int, int]], capacity: int, done: int
) -> None:
    prompts, tokens = ([request[n] for request in requests] for n in (0, 1))
    waiting, rows, rounds = list(range(len(requests))), dict[int, int](), list[tuple[int, float]]()
    while waiting or rows:
        while waiting and len(rows) < capacity:
            rows[waiting.pop(0)] = 0
        rounds.append((len(rows), sum(prompts[row] + made for row, made in rows.items()) / len(rows)))
        rows = {row: made + 1 for row, made in rows.items() if made + 1 < tokens[row]}
    found = plain_rounds(prompts, tokens, capacity, done)
    batches = [each.batch for each in found for _ in range(each.rounds)]
    assert batches == [batch for batch, _ in rounds[done:]]
    # Of rounds of the same rows the mean length is enough, for times grow with it evenly.
    total = sum(batch * length for batch, length in rounds[done:])
    assert sum(each.rounds * each.batch * each.length for each in found) == pytest.approx(total)


def measured(*rounds: tuple[int, float]) -> OverheadCorrection:
    found = OverheadCorrection()
    for batch, seconds in rounds:
        for _ in range(LEAST_ROUNDS):
            found.record(batch, 0.0, seconds)
    return found


def test_seconds_as_measured() -> None:
    rounds = [PlainRounds(10, 8, 100.0), PlainRounds(20, 2, 110.0)]
    assert seconds_of(rounds, measured((8, 3.0), (2, 1.0))) == 10 * 3.0 + 20 * 1.0
    assert seconds_of(rounds, measured((4, 2.0))) == 30 * 2.0  # near enough to both


def test_not_known_where_nothing_alike_was_measured() -> None:
    rounds = [PlainRounds(10, 8, 100.0), PlainRounds(20, 1, 110.0)]
    assert seconds_of(rounds, OverheadCorrection()) is None
    assert seconds_of(rounds, measured((8, 3.0))) is None  # says nothing of single rows, which most rounds are of
    assert seconds_of(rounds, measured((2, 1.0))) == 30 * 1.0  # two thirds of the rounds are near it
    once = OverheadCorrection()
    once.record(1, 0.0, 1.0)
    assert seconds_of(rounds, once) is None
    assert seconds_of([], OverheadCorrection()) == 0


def test_seconds_of_a_corrected_profile() -> None:
    """Predicted by batch and length, and half a second more than that, as rounds of 8 showed."""
    correction = OverheadCorrection()
    correction.record(8, 2.0, 2.5)
    found = seconds_of([PlainRounds(4, 8, 100.0), PlainRounds(2, 1, 50.0)], correction, lambda b, s: b + s / 100)
    assert found == pytest.approx(4 * (9.0 + 0.5) + 2 * (1.5 + 0.5))
