"""How many forwards a rollout captures while its rows finish, and where memory is little; with a tape in the place of
CUDA graphs."""

import re

import pytest

from spec_trl.generation import decoding
from spec_trl.generation.engine import room
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5 + row % 7 for row in range(64)]))
LENGTHS = dict(max_new_tokens=240, eos_token_id=[1, 2])  # geometric


@pytest.mark.parametrize(("strategy", "most"), [("self", 8), ("none", 4)])
def test_a_rollout_of_64_rows_captures_few_shapes(tape, strategy: str, most: int) -> None:
    """Each rollout anew: 21 and 11 before, when rows went in buckets of 1, 2, 4, 8 and then of 8 more, and a draft's
    steps were captured before its loop."""
    model = tiny_llama(num_hidden_layers=1)
    for seed in (1, 2):
        recorded, replayed = tape.recorded, tape.replayed
        found = generate(model, PROMPTS, strategy, {"runner": "graph", "keep_graphs": False, "seed": seed}, **LENGTHS)
        assert found.statistics.rounds > 30 and tape.recorded - recorded <= most
        assert tape.replayed - replayed > 0.9 * found.statistics.rounds
        plain = generate(model, PROMPTS, "none", {"runner": "eager", "seed": seed}, **LENGTHS)
        assert outputs(found) == outputs(plain)


NEEDED = 16 * 8192 * 64 * 8 + 64 * (75 * 512 + 3 * 6 * 64 * 4 + 256 * 512)  # bytes: a prefill, and 64 rows (RowNeeds)


@pytest.mark.parametrize(
    ("left", "captures", "said"),
    [
        (16 << 20, 4, r"may take 0\.02 GiB instead of max_graph_memory=4\. Tokens"),
        (6 << 20, 3, r"may take 0\.01 GiB instead of max_graph_memory=4, and 39 of 64 rows are in flight\..*Lower"),
    ],
)
def test_little_memory_makes_captured_forwards_fewer_before_rows(
    tape, monkeypatch: pytest.MonkeyPatch, left: int, captures: int, said: str
) -> None:
    """Rows were one at a time, without a word, and took 15 times as many rounds."""
    model = tiny_llama(num_hidden_layers=1)
    config = {"runner": "graph", "draft_length": 5}
    plain = generate(model, PROMPTS, "none", {"runner": "eager"}, **LENGTHS)
    monkeypatch.setattr(tape, "bytes", lambda: tape.recorded << 22)  # four captures take 16 MiB
    monkeypatch.setattr(room, "LEAST_GRAPH_MEMORY", 0)
    monkeypatch.setattr(room, "warned_of", set())
    monkeypatch.setattr(decoding, "free_for_cache", lambda model: NEEDED + left)
    with pytest.warns(UserWarning) as seen:
        found = [generate(model, PROMPTS, "self", config, **LENGTHS) for _ in range(2)]
    little, reached = (str(each.message) for each in seen)  # once each
    assert "captured forwards take" in reached and re.search(said, little)
    assert all(outputs(each) == outputs(plain) for each in found) and tape.recorded == captures
    assert found[0].statistics.rounds < 60
