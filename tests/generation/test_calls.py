"""Calls within calls, calls at the same time, and what is left when they have ended."""

import gc
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

import spec_trl
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.engine.captured import GraphRunner
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.kept import look
from spec_trl.measuring import fill_ladder
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.ladder import Ladder, Rung
from spec_trl.scheduling.selection import AcceptanceHistory
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5, 9, 1, 7]))
OTHERS = pad_left(random_rows([3, 6], seed=3))
SHORT = {"max_new_tokens": 14}
EAGER = {"runner": "eager"}


def arguments(strategy: str, assistant: LlamaForCausalLM) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and the keywords of a call."""
    learns = {"tts_drafter": "model", "tts_scope": "run"} if strategy == "tts" else {}
    helped = {"assistant_model": assistant} if strategy in ("model", "tts") else {}
    return {"draft_length": 2} | learns, SHORT | helped


# ---- inside one another, and at the same time -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "runner"), [("self", "graph"), ("model", "graph"), ("self", "eager"), ("tts", "eager")]
)
def test_a_generation_inside_a_generation(fresh, tiny_assistant, tape, strategy, runner) -> None:
    """With the same model and options, as a judge does: what it keeps and drafts with is not the outer one's."""
    config, options = arguments(strategy, tiny_assistant)
    config = config | {"runner": runner}
    expected, inside = (outputs(generate(fresh, each, config=EAGER, **SHORT)) for each in (PROMPTS, OTHERS))

    def judge(number: int) -> None:
        if number == 6:
            found = generate(fresh, OTHERS, strategy, config, **options)
            assert outputs(found) == inside and found.statistics.drafter_failure is None

    criteria = [each := EachRound(judge)]
    result = generate(fresh, PROMPTS, strategy, config, stopping_criteria=criteria, **options)
    assert outputs(result) == expected and each.round > 6
    assert result.statistics.drafter_failure is None
    assert outputs(generate(fresh, PROMPTS, strategy, config, **options)) == expected
    assert runner == "eager" or tape.replayed


@pytest.mark.parametrize(("strategy", "runner"), [("self", "graph"), ("self", "eager"), ("tts", "eager")])
@pytest.mark.filterwarnings("error:the drafter")
def test_generations_in_two_threads(fresh, tiny_assistant, tape, strategy, runner) -> None:
    """In step with each other, round by round."""
    config, options = arguments(strategy, tiny_assistant)
    config = config | {"runner": runner}
    prompts = [PROMPTS, OTHERS]
    expected = [outputs(generate(fresh, each, config=EAGER, **SHORT)) for each in prompts]
    generate(fresh, PROMPTS, strategy, config, **options)  # what it drafted with is kept
    together = threading.Barrier(2, timeout=60)

    def wait(number: int) -> None:
        if number < 4:
            together.wait()

    def call(each: dict[str, Tensor]) -> list[list[int]]:
        result = generate(fresh, each, strategy, config, stopping_criteria=[EachRound(wait)], **options)
        assert result.statistics.drafter_failure is None and result.statistics.total.accepted > 0
        return outputs(result)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, prompts)) == expected


def test_a_drafter_serves_one_generation_at_a_time(tiny) -> None:
    drafter = SelfDrafter(tiny, kernel="reference")

    def again(number: int) -> None:
        if number == 2:
            with pytest.raises(ValueError, match="drafter=SelfDrafter is in use: a drafter serves one generation"):
                generate(tiny, OTHERS, drafter=drafter)

    result = generate(tiny, PROMPTS, drafter=drafter, stopping_criteria=[EachRound(again)])
    assert outputs(result) == outputs(generate(tiny, PROMPTS)) and result.statistics.drafter_failure is None
    assert outputs(generate(tiny, OTHERS, drafter=drafter)) == outputs(generate(tiny, OTHERS))


# ---- what is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["self", "tts"])
@pytest.mark.filterwarnings("ignore:the drafter", "ignore:.*beyond the model's context")
def test_a_call_that_fails_puts_its_drafter_back(fresh, tiny_assistant, strategy) -> None:
    """Packing the copy takes seconds, and what was learned in a run cannot be had again."""
    config, options = arguments(strategy, tiny_assistant)
    generate(fresh, PROMPTS, strategy, config, **options)
    drafter = look(fresh, strategy)

    def fail(number: int) -> None:
        raise RuntimeError("of the criterion")

    with pytest.raises(RuntimeError, match="of the criterion"):
        generate(fresh, PROMPTS, strategy, config, stopping_criteria=[EachRound(fail)], **options)
    with pytest.raises(ValueError, match="would not fit in memory"):
        generate(fresh, PROMPTS, strategy, config, **(options | {"max_new_tokens": 10**12}))
    assert drafter is not None and look(fresh, strategy) is drafter
    assert outputs(generate(fresh, PROMPTS, strategy, config, **options)) == outputs(generate(fresh, PROMPTS, **SHORT))


def test_release_frees_all_that_is_kept(fresh, tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (Drafter, GraphRunner, Ladder, BestOfN, AcceptanceHistory, PreTrainedModel)

    def alive() -> Counter[type]:
        gc.collect()
        return Counter(type(thing) for thing in gc.get_objects() if isinstance(thing, kinds))

    def build(model: LlamaForCausalLM, drafters: list[Drafter], *_: Any, **__: Any) -> Ladder:
        return Ladder(tuple(Rung(each.strategy, 1, 3, 0.5, 1.0, 1.0) for each in drafters), "")

    monkeypatch.setattr(fill_ladder, "build_ladder", build)
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    assistant = tiny_llama(seed=1)
    before = alive()
    for strategy in ("self", "model", "tts", "auto"):
        config, options = arguments(strategy, assistant)
        generate(fresh, PROMPTS, strategy, config | {"runner": "graph"}, **options)
    new = alive() - before
    assert {SelfDrafter, DistilledDrafter, GraphRunner, Ladder, BestOfN, AcceptanceHistory} <= set(new)
    spec_trl.release(fresh)
    assert alive() == before
