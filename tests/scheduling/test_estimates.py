"""What measured rounds teach about a prediction, what plain decoding would have taken, and when the last row ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.scheduling.admission import PATIENCE
from spec_trl.scheduling.correction import MEMORY, OverheadCorrection
from spec_trl.scheduling.last_row import until_last_row
from spec_trl.scheduling.plain_decoding import LEAST_ROUNDS, PlainRounds, plain_rounds, seconds_of


def corrected(*rounds: tuple[int, float, float], times: int = 1) -> OverheadCorrection:
    """After rounds of (batch, predicted seconds, seconds), each so many times."""
    correction = OverheadCorrection()
    for batch, predicted, seconds in rounds:
        for _ in range(times):
            correction.record(batch, predicted, seconds)
    return correction


# ---- correction -----------------------------------------------------------------------------------------------------


def test_the_median_of_the_newest_rounds_counts() -> None:
    assert OverheadCorrection().apply(8, 3.0) == 3.0
    correction = corrected((8, 1.0, 1.5), (8, 1.0, 90.0), (8, 1.0, 1.5))
    assert correction.apply(8, 1.0) == 1.5
    for _ in range(MEMORY):
        correction.record(8, 1.0, 2.0)
    for _ in range(MEMORY // 2 + 1):  # more than half of those that count
        correction.record(8, 1.0, 3.0)
    assert correction.apply(8, 1.0) == 3.0


@pytest.mark.parametrize(
    ("batch", "predicted", "expected"),
    # Half a second at 1 row, two seconds at 64 to 127; between them what is nearer by ratio; at least a tenth.
    [(64, 20.0, 22.0), (100, 20.0, 22.0), (1, 5.0, 5.5), (2, 5.0, 5.5), (32, 5.0, 7.0), (99, 5.0, 7.0), (8, 2.0, 0.2)],
)
def test_overhead_is_per_round_and_of_batches_of_like_size(batch: int, predicted: float, expected: float) -> None:
    rounds = [(8, 10.0, 1.0)] if batch == 8 else [(64, 10.0, 12.0), (1, 1.0, 1.5)]
    assert corrected(*rounds).apply(batch, predicted) == pytest.approx(expected)


def test_what_is_known() -> None:
    correction = corrected(*((batch, 0.0, 1.0) for batch in (8, 12, 15, 64)))  # the first three are of one size
    assert [correction.knows(batch, 3) for batch in (7, 8, 11, 15, 16)] == [False, True, True, True, False]
    assert [correction.knows(batch, 3, reach=1) for batch in (3, 4, 16, 31, 32)] == [False, True, True, True, False]
    assert correction.batches(3) == [8] and correction.batches(1) == [8, 64] and not correction.is_empty


# ---- plain decoding -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 15)), min_size=1, max_size=30),
    st.integers(1, 16),
    st.integers(0, 12),
)
def test_rounds_are_those_of_decoding_round_by_round(
    requests: list[tuple[int, int]], capacity: int, done: int
) -> None:
    """Prompts of one length are one prompt. Free rows wait, but for a prompt in flight."""
    prompts, tokens = ([request[n] for request in requests] for n in (0, 1))
    waiting, rows, rounds, empty = list(range(len(requests))), dict[int, int](), list[tuple[int, float]](), 0
    while waiting or rows:
        empty += capacity - len(rows)
        shares = waiting and prompts[waiting[0]] in {prompts[row] for row in rows}
        if not rows or shares or empty >= PATIENCE * capacity:
            empty = 0
            while waiting and len(rows) < capacity:
                rows[waiting.pop(0)] = 0
        rounds.append((len(rows), sum(prompts[row] + made for row, made in rows.items()) / len(rows)))
        rows = {row: made + 1 for row, made in rows.items() if made + 1 < tokens[row]}
    found = plain_rounds([(prompt, str(prompt)) for prompt in prompts], tokens, capacity, done)
    batches = [each.batch for each in found for _ in range(each.rounds)]
    assert batches == [batch for batch, _ in rounds[done:]]
    # Of rounds of the same rows the mean length is enough, for times grow with it evenly.
    total = sum(batch * length for batch, length in rounds[done:])
    assert sum(each.rounds * each.batch * each.length for each in found) == pytest.approx(total)


@pytest.mark.parametrize(
    ("rows", "measured", "expected"),
    [
        ((8, 2), [(8, 0.0, 3.0), (2, 0.0, 1.0)], 10 * 3.0 + 20 * 1.0),
        ((8, 2), [(4, 0.0, 2.0)], 30 * 2.0),  # near enough to both
        ((8, 1), [], None),
        ((8, 1), [(8, 0.0, 3.0)], None),  # says nothing of single rows, which most rounds are of
        ((8, 1), [(2, 0.0, 1.0)], 30 * 1.0),  # two thirds of the rounds are near it
    ],
)
def test_seconds_as_measured(
    rows: tuple[int, int], measured: list[tuple[int, float, float]], expected: float | None
) -> None:
    rounds = [PlainRounds(10, rows[0], 100.0), PlainRounds(20, rows[1], 110.0)]
    assert seconds_of(rounds, corrected(*measured, times=LEAST_ROUNDS)) == expected
    assert seconds_of(rounds, corrected(*measured)) is None  # each was measured once
    assert seconds_of([], OverheadCorrection()) == 0


def test_seconds_of_a_corrected_profile() -> None:
    """Predicted by batch and length, and half a second more than that, as rounds of 8 showed."""
    rounds = [PlainRounds(4, 8, 100.0), PlainRounds(2, 1, 50.0)]
    found = seconds_of(rounds, corrected((8, 2.0, 2.5)), lambda b, s: b + s / 100)
    assert found == pytest.approx(4 * (9.0 + 0.5) + 2 * (1.5 + 0.5))


# ---- the last row ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taus", [[1.0, 4.0], [2.0, 2.0, 4.0], [1.5, 3.0, 4.5, 2.5], [3.0], [3.0] * 4])
def test_the_last_row_is_between_the_smallest_and_the_harmonic_mean(taus: list[float]) -> None:
    assert until_last_row(taus, lambda batch: 7.0) == pytest.approx(min(taus))
    harmonic = len(taus) / sum(1 / tau for tau in taus)
    assert until_last_row(taus, lambda batch: 2.0 * batch) == pytest.approx(harmonic)
    assert min(taus) <= until_last_row(taus, lambda batch: 1.0 + batch) <= harmonic + 1e-9


def test_the_last_row_by_hand() -> None:
    """A quarter of the rounds has two rows, at 3 s; the others have one, at 2 s."""
    assert until_last_row([1.0, 4.0], lambda batch: 1.0 + batch) == pytest.approx(3 / (0.25 * 3 + 0.75 * 2))
