"""A drafter on a thread of its own: what it may use, how it fails, and the option that asks for it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from spec_trl import release
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.session import Session
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, generate, outputs
from tests.generation.races import EOS, PROMPTS
from tests.papers.specactor.decoupled.scripted import Chance


@pytest.fixture(scope="module")
def texts(tiny) -> list[list[int]]:
    return outputs(generate(tiny, PROMPTS, **EOS))


def drafting_threads() -> int:
    return sum(thread.name == "spec_trl drafter" for thread in threading.enumerate())


class Trouble(KeyError):
    pass


@pytest.mark.parametrize("method", ["begin", "admit", "propose", "observe", "move", "end"])
def test_a_drafter_that_raises(method: str, tiny, texts, monkeypatch) -> None:
    """Its own error is reported, whenever it came, and the thread ends."""

    def fail(*_: Any) -> None:
        raise Trouble("the drafter's own")

    drafter = Chance(texts, 0.9)
    monkeypatch.setattr(drafter, method, fail)
    with pytest.warns(UserWarning, match="same tokens. Trouble: .the drafter's own"):
        result = generate(tiny, PROMPTS, drafter=DecoupledDrafter(DraftThread(drafter)), **EOS)
    assert outputs(result) == texts and drafting_threads() == 0


def test_a_drafter_that_hangs_is_waited_for_once(tiny, texts) -> None:
    is_over = threading.Event()
    calls = 0

    class Hanging(Chance):
        made_for = ("kept for the next call",)

        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            nonlocal calls
            calls += 1
            if calls == 2:
                is_over.wait()
            return super().propose(draft_length, noise)

    drafter = Hanging(texts, 0.9)
    with pytest.warns(UserWarning, match="TimeoutError: the drafter's thread gave no window within 0.2 s"):
        result = generate(tiny, PROMPTS, drafter=DecoupledDrafter(DraftThread(drafter, timeout=0.2)), **EOS)
    assert outputs(result) == texts and result.statistics.total.accepted > 0
    assert drafter.made_for is None  # its thread is still in it
    is_over.set()


def test_a_drafter_that_hangs_serves_no_later_generation_until_it_returns(tiny) -> None:
    """A copy that went on meanwhile would write to the target's K/V, where the later generation drafts coupled."""
    is_over = threading.Event()

    class Hanging(SelfDrafter):
        calls = 0

        def begin(self, session: DraftSession) -> None:
            super().begin(session)
            forward = self._runner.forward

            def hang(*fed: Any) -> Any:
                self.calls += 1
                if self.calls == 6:  # within a window
                    is_over.wait()
                return forward(*fed)

            self._runner.forward = hang

    def wake(number: int) -> None:
        if number == 5:
            is_over.set()
            time.sleep(0.2)

    drafter, options = Hanging(tiny, kernel="reference"), dict(max_new_tokens=60)
    expected = outputs(generate(tiny, PROMPTS, **options))
    with pytest.warns(UserWarning, match="no window within 0.1 s"):
        generate(tiny, PROMPTS, drafter=DecoupledDrafter(DraftThread(drafter, timeout=0.1)), **options)
    for each in (DecoupledDrafter(DraftThread(drafter)), drafter):
        options["stopping_criteria"] = [EachRound(wake)] if each is drafter else []
        with pytest.warns(UserWarning, match="still used by a background thread of an earlier call"):
            assert outputs(generate(tiny, PROMPTS, drafter=each, **options)) == expected
    while drafting_threads():
        time.sleep(0.01)
    found = generate(tiny, PROMPTS, drafter=drafter, max_new_tokens=60)
    assert outputs(found) == expected and found.statistics.total.accepted > 0


def test_a_drafter_serves_one_generation_at_a_time(tiny, drafters) -> None:
    (drafter,) = drafters("self")

    def generate_inside(number: int) -> None:
        if number == 2:
            with pytest.raises(ValueError, match="drafter=SelfDrafter is in use"):
                generate(tiny, PROMPTS, drafter=drafter)

    ahead = DecoupledDrafter(DraftThread(drafter))
    found = generate(tiny, PROMPTS, drafter=ahead, stopping_criteria=[EachRound(generate_inside)])
    assert found.statistics.drafter_failure is None and found.statistics.total.accepted > 0


def test_a_drafter_that_fails_lets_go_of_the_targets_cache(tiny) -> None:
    class Failing(SelfDrafter):
        def observe(self, *_: Any) -> None:
            raise Trouble

    drafter = Failing(tiny, kernel="reference")
    with pytest.warns(UserWarning, match="Trouble"):
        generate(tiny, PROMPTS, drafter=DecoupledDrafter(DraftThread(drafter)))
    assert not hasattr(drafter, "session") and not hasattr(drafter, "cache")


def test_a_generation_that_is_over_before_a_window_is_drafted(tiny, texts, drafters) -> None:
    ahead = DecoupledDrafter(DraftThread(*drafters("self")))
    assert outputs(generate(tiny, PROMPTS, drafter=ahead, max_new_tokens=1, **EOS)) == [text[:1] for text in texts]
    assert drafting_threads() == 0


def test_a_network_of_nan(tiny, texts, drafters) -> None:
    (drafter,) = drafters("self")
    with torch.no_grad():
        next(iter(drafter.quantized.layers.values())).packed.scales.fill_(torch.nan)
    with pytest.warns(UserWarning, match="FloatingPointError: the draft network returned NaN"):
        assert outputs(generate(tiny, PROMPTS, drafter=DecoupledDrafter(DraftThread(drafter)), **EOS)) == texts


def test_the_thread_has_the_callers_autocast_and_leaves_its_cores_alone(texts) -> None:
    narrow = tiny_llama().float()
    seen: list[tuple[bool, bool]] = []

    class Looking(Chance):
        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            torch.set_num_threads(1)
            return super().propose(draft_length, noise)

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                generate(narrow, PROMPTS, drafter=DecoupledDrafter(DraftThread(Looking(texts, 1.0))))
            assert set(seen) == {(enabled, False)}
            seen.clear()
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor() as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(threads)


# ---- the option ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["self", "model", "ngram"])
def test_always(strategy: str, fresh, tiny_assistant, texts) -> None:
    options = dict(assistant_model=tiny_assistant) if strategy == "model" else {}
    for _ in range(2):  # the copy is kept
        result = generate(fresh, PROMPTS, strategy, {"specactor": {"decoupled_execution": "always"}}, **options, **EOS)
        assert outputs(result) == texts and result.statistics.drafter_failure is None
    assert drafting_threads() == 0
    assert (Session.of(fresh).drafters.get("self") is not None) == (strategy == "self")
    release(fresh)


def test_a_decoupled_drafter_drafts_for_no_loop_of_transformers(drafters) -> None:
    with pytest.raises(ValueError, match="DecoupledDrafter drafts while the target verifies"):
        DecoupledDrafter(DraftThread(*drafters("ngram"))).prepare_assisted_decoding(3, 9, True, [])
