"""Calls within calls, calls at the same time, and what is left when they have ended."""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

import spec_trl
from spec_trl.generation import session
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.cuda.graph_runner import GraphRunner
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.planner.planner import Planner
from spec_trl.generation.session import Session
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, Prompts, generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5, 9, 1, 7]))
OTHERS = pad_left(random_rows([3, 6], seed=3))
Call = Callable[..., Any]


@pytest.fixture
def way(fresh: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM) -> Callable[..., Call]:
    """Makes calls of the fresh model by strategy and runner."""

    def make(strategy: str, runner: str = "eager", assistant: LlamaForCausalLM = tiny_assistant) -> Call:
        config: dict[str, Any] = {"draft_length": 2, "runner": runner}
        if strategy == "tts":
            config |= {"tts": {"drafter": "model", "scope": "run", "stride": 1}}
        helped = {"assistant_model": assistant} if strategy in ("model", "tts") else {}

        def call(prompts: Prompts, **options: Any) -> Any:
            return generate(fresh, prompts, strategy, config, **({"max_new_tokens": 14} | helped | options))

        return call

    return make


# ---- inside one another, and at the same time -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "runner"), [("self", "graph"), ("model", "graph"), ("self", "eager"), ("tts", "eager")]
)
def test_a_generation_inside_a_generation(way, tape, strategy: str, runner: str) -> None:
    """With the same model and options, as a judge does: what it keeps and drafts with is not the outer one's."""
    call, plain = way(strategy, runner), way("none")

    def judge(number: int) -> None:
        if number == 6:
            found = call(OTHERS)
            assert outputs(found) == outputs(plain(OTHERS)) and found.statistics.drafter_failure is None

    result = call(PROMPTS, stopping_criteria=[each := EachRound(judge)])
    assert outputs(result) == outputs(call(PROMPTS)) == outputs(plain(PROMPTS)) and each.round > 6
    assert result.statistics.drafter_failure is None
    assert runner == "eager" or tape.replayed


@pytest.mark.parametrize(("strategy", "runner"), [("self", "graph"), ("self", "eager"), ("tts", "eager")])
@pytest.mark.filterwarnings("error:the drafter")
def test_generations_in_two_threads(way, tape, strategy: str, runner: str) -> None:
    """In step with each other, round by round."""
    call, prompts = way(strategy, runner), [PROMPTS, OTHERS]
    expected = [outputs(way("none")(each)) for each in prompts]
    call(PROMPTS)  # what it drafted with is kept
    together = threading.Barrier(2, timeout=60)

    def in_step(each: dict[str, Tensor]) -> list[list[int]]:
        result = call(each, stopping_criteria=[EachRound(lambda number: number < 4 and together.wait())])
        assert result.statistics.drafter_failure is None and result.statistics.total.accepted > 0
        return outputs(result)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(in_step, prompts)) == expected


def test_calls_beside_a_running_one_keep_what_they_make(
    way, fresh: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, packed, refresh = way("self"), [], SelfDrafter.refresh
    monkeypatch.setattr(SelfDrafter, "refresh", lambda each, *args: packed.append(each) or refresh(each, *args))

    def beside(number: int) -> None:
        if number in (2, 4):
            call(OTHERS)

    call(PROMPTS, stopping_criteria=[EachRound(beside)])
    call(OTHERS)
    assert len(packed) == 2  # the outer call's, and that of both calls beside it
    spec_trl.release(fresh)
    gone = [weakref.ref(drafter) for drafter in packed]
    packed.clear()
    gc.collect()
    assert [left() for left in gone] == [None, None]


def test_an_interrupt_at_the_end_of_a_call_leaves_no_session_in_use(
    way, fresh: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = way("self")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(session, "structure", lambda model: (_ for _ in ()).throw(KeyboardInterrupt))
        call(PROMPTS)
    call(PROMPTS)
    assert "self" in Session.of(fresh).drafters


def test_a_drafter_serves_one_generation_at_a_time(tiny: LlamaForCausalLM) -> None:
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
def test_a_call_that_fails_puts_its_drafter_back(way, fresh: LlamaForCausalLM, strategy: str) -> None:
    """Packing the copy takes seconds, and what was learned in a run cannot be had again."""
    call = way(strategy)
    call(PROMPTS)
    drafter = Session.of(fresh).drafters.get(strategy)
    with pytest.raises(ZeroDivisionError):
        call(PROMPTS, stopping_criteria=[EachRound(lambda number: 1 // 0)])
    with pytest.raises(ValueError, match="would not fit in memory"):
        call(PROMPTS, max_new_tokens=10**12)
    assert drafter is not None and Session.of(fresh).drafters.get(strategy) is drafter
    assert outputs(call(PROMPTS)) == outputs(way("none")(PROMPTS))


def test_release_frees_all_that_is_kept(way, fresh, tape) -> None:
    kinds = (Drafter, GraphRunner, Planner, PreTrainedModel)

    def alive() -> Counter[type]:
        return Counter(type(thing) for thing in gc.get_objects() if isinstance(thing, kinds))

    assistant = tiny_llama(seed=1)
    gc.collect()
    before = alive()
    for strategy in ("self", "model", "tts", "auto"):
        way(strategy, "graph", assistant)(PROMPTS)
    new = alive() - before
    assert {SelfDrafter, DistilledDrafter, GraphRunner, Planner} <= set(new)
    spec_trl.release(fresh)
    assert alive() == before


def test_release_collects_only_what_was_captured(way, fresh, monkeypatch) -> None:
    """A collection takes 0.3 s, and what is not captured goes without one."""
    assistant = tiny_llama(seed=1)
    for strategy in ("none", "self", "tts", "auto"):
        way(strategy, "eager", assistant)(PROMPTS)
    gc.collect()
    session = Session.of(fresh)
    held = [session.shadow.network, session.snapshot, *(session.drafters[name] for name in ("self", "tts", "history"))]
    held = list(map(weakref.ref, held))
    del session
    collections: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collections.append(1))
    spec_trl.release(fresh)
    assert not collections and [each() for each in held] == [None] * len(held)
