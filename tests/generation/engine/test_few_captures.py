"""How many forwards a rollout captures while its rows finish, on a tape in the place of CUDA graphs."""

import pytest

from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5 + row % 7 for row in range(64)]))
LENGTHS = dict(max_new_tokens=240, eos_token_id=[1, 2])  # geometric


@pytest.mark.parametrize(("strategy", "most"), [("self", 8), ("none", 4)])
def test_a_rollout_of_64_rows_captures_few_shapes(tape, strategy: str, most: int) -> None:
    """Each rollout anew: 21 and 11 before, when rows went in buckets of 1, 2, 4, 8 and then of 8 more, and each step of
    a draft was captured before its loop."""
    model = tiny_llama(num_hidden_layers=1)
    for seed in (1, 2):
        recorded, replayed = tape.recorded, tape.replayed
        found = generate(model, PROMPTS, strategy, {"runner": "graph", "keep_graphs": False, "seed": seed}, **LENGTHS)
        assert found.statistics.rounds > 30 and tape.recorded - recorded <= most
        assert tape.replayed - replayed > 0.9 * found.statistics.rounds
        plain = generate(model, PROMPTS, "none", {"runner": "eager", "seed": seed}, **LENGTHS)
        assert outputs(found) == outputs(plain)
