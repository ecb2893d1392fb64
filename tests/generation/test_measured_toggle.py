"""The default toggle: no calibration before the first token; rounds tell what pays, and later calls remember."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import spec_trl
from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.measuring import fill_ladder, profile_cache
from spec_trl.measuring.fill_ladder import find_ladder
from spec_trl.scheduling.toggle import FEWEST
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.conftest import Clock


PROMPTS = pad_left(random_rows([9, 5]))
MEASURED: dict[str, Any] = {"sd_toggle": SpeculativeConfig.sd_toggle}


@pytest.fixture
def model() -> Iterator[LlamaForCausalLM]:
    """One of its own: what calls learned of it is kept with it."""
    model = tiny_llama()
    yield model
    spec_trl.release(model)


@pytest.fixture
def nothing_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("something was profiled before the first token")

    monkeypatch.setattr(profile_cache, "calibrate", fail)
    monkeypatch.setattr(fill_ladder, "build_ladder", fail)


@pytest.mark.parametrize("strategy", ["self", "ngram", "history", "tts", "auto", "best_of_n"])
def test_nothing_comes_before_the_first_token(
    model: LlamaForCausalLM, nothing_is_profiled: None, strategy: str
) -> None:
    assert SpeculativeConfig.sd_toggle == "measured"
    expected = outputs(generate(model, PROMPTS))
    first, second = (generate(model, PROMPTS, strategy, MEASURED) for _ in range(2))
    assert outputs(first) == outputs(second) == expected
    assert drafting_rounds(first.statistics), "it was not tried"


def test_what_measured_slower_is_off_in_later_calls(model: LlamaForCausalLM, clock: Clock) -> None:
    clock.draft_seconds = 1000.0
    expected = outputs(generate(model, PROMPTS))
    first = generate(model, PROMPTS, "ngram", MEASURED).statistics
    assert 0 < drafting_rounds(first) <= FEWEST
    second = generate(model, PROMPTS, "ngram", MEASURED)
    assert drafting_rounds(second.statistics) == 0 and outputs(second) == expected
    assert drafting_rounds(generate(model, PROMPTS, "self", MEASURED).statistics) > 0  # another drafter
    assert drafting_rounds(generate(model, PROMPTS, "ngram", MEASURED).statistics) == 0  # does not make it forget
    spec_trl.release(model)
    assert drafting_rounds(generate(model, PROMPTS, "ngram", MEASURED).statistics) > 0


def test_rounds_fill_the_ladder(model: LlamaForCausalLM, clock: Clock, nothing_is_profiled: None) -> None:
    """Once each drafter was tried, "best_of_n" chooses by acceptance and races."""
    config = MEASURED | {"best_of_n_drafters": ["ngram", "history"], "draft_length": 2}
    options: dict[str, Any] = dict(max_new_tokens=60)
    expected = outputs(generate(model, PROMPTS, **options))
    kept = SpeculativeConfig(draft_kernel="reference", **config)  # as `generate` below has it
    drafters = [NgramDrafter(3), HistoryDrafter(kept.history_max_tokens)]
    assert find_ladder(model, drafters, kept, 2) is None
    for _ in range(3):
        assert outputs(generate(model, PROMPTS, "best_of_n", config, **options)) == expected
    ladder = find_ladder(model, drafters, kept, 2)
    assert ladder is not None and ladder.methods == ("ngram", "history")
    assert ladder.draft_lengths("ngram", 2) == (2,)
    assert outputs(generate(model, PROMPTS, "best_of_n", config, **options)) == expected


def drafting_rounds(statistics: Any) -> int:
    return sum(point.rounds for point in statistics.points if point.draft_length)
