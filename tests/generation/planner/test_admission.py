"""The rounds that plain decoding would have taken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.generation.planner.control import MAX_EMPTY_ROUNDS, plain_rounds


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 15)), min_size=1, max_size=30),
    st.integers(1, 16),
    st.integers(0, 12),
)
def test_rounds_are_those_of_decoding_round_by_round(
    requests: list[tuple[int, int]], capacity: int, done: int
) -> None:
    """Prompts of one length are one prompt. Free rows wait, but for a prompt in flight, or where a request needs no
    round."""
    prompts, tokens = ([request[n] for request in requests] for n in (0, 1))
    waiting, rows, rounds, empty = list(range(len(requests))), dict[int, int](), list[tuple[int, float]](), 0
    while waiting or rows:
        empty += capacity - len(rows)
        shares = waiting and prompts[waiting[0]] in {prompts[row] for row in rows}
        if not rows or shares or empty >= MAX_EMPTY_ROUNDS * capacity:
            empty = 0
            while waiting and len(rows) < capacity:
                rows[waiting.pop(0)] = 0
            if not all(tokens[row] for row in rows):
                rows = {row: made for row, made in rows.items() if tokens[row]}
                continue
        rounds.append((len(rows), sum(prompts[row] + made for row, made in rows.items()) / len(rows)))
        rows = {row: made + 1 for row, made in rows.items() if made + 1 < tokens[row]}
    found = plain_rounds([(prompt, str(prompt)) for prompt in prompts], tokens, capacity, done)
    batches = [each.batch for each in found for _ in range(each.rounds)]
    assert batches == [batch for batch, _ in rounds[done:]]
    # Of rounds of the same rows the mean length is enough, for times grow with it evenly.
    total = sum(batch * length for batch, length in rounds[done:])
    assert sum(each.rounds * each.batch * each.length for each in found) == pytest.approx(total)
