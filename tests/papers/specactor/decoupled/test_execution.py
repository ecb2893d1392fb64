"""The option specactor.decoupled_execution: "auto" takes what is predicted to be fastest, and training is the same."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import release
from spec_trl.generation.options import SpeculativeConfig
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.specactor.decoupled import execution
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs
from tests.generation.races import PROMPTS
from tests.generation.test_control import PROFILE
from tests.papers.specactor.decoupled.scripted import Chance, InTurn
from tests.trainers.harness import assert_same_training, train, train_plainly


def profile_of(draft_seconds: float) -> Profile:
    """Of a machine whose verification takes a second, whatever it verifies."""
    times = Coefficients(1e30, 1e30, 1.0, 1.0, 0.0, 0.0, 0.0, t_T=1.0, t_D=draft_seconds, t_V=1.0)
    return replace(PROFILE, roofline=Roofline(PROFILE.roofline.constants, times))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Links to threads that were made; torch leaves one of two cores."""
    links: list[Any] = []

    class Watched(execution.DraftThread):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            links.append(self)

    monkeypatch.setattr(execution, "DraftThread", Watched)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS and Windows
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return links


@pytest.mark.parametrize(
    ("draft_seconds", "acceptance", "missing"),
    [
        (0.2, 1.0, None),  # a window takes as long as its verification
        (0.001, 0.7, "gain"),  # there is nothing to hide, and a refused draft costs a period
        (3.0, 1.0, "gain"),  # plain decoding is faster than any
        (None, 1.0, "profile"),
        (0.2, 1.0, "core"),  # no core is left
        (0.2, 1.0, "exactness"),  # drafts are verified by chance
        (0.2, 1.0, "coupling"),  # the drafter is decoupled already
    ],
)
def test_auto(draft_seconds: float | None, acceptance: float, missing: str | None, made, monkeypatch) -> None:
    """Decouples from the second call on, when the acceptance is known, unless something is missing."""
    model = tiny_llama()
    texts = outputs(generate(model, PROMPTS))
    monkeypatch.setattr(execution, "find_profile", lambda *_: draft_seconds and profile_of(draft_seconds))
    if missing == "core":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    drafter = Chance(texts, acceptance)
    drafter.has_probabilities = missing != "coupling"  # a network's: its forwards cost time
    if missing == "coupling":
        drafter = DecoupledDrafter(InTurn(drafter))
    config = {"specactor": {"decoupled_execution": "auto"}, "draft_length": 4}
    config |= {"verification": "rejection"} if missing == "exactness" else {}
    for call in range(2):
        result = generate(model, PROMPTS, drafter=drafter, config=config)
        assert (outputs(result) == texts or missing == "exactness") and result.statistics.drafter_failure is None
        assert len(made) == (missing is None and call == 1)
    release(model)


def test_always_needs_no_prediction(made, monkeypatch) -> None:
    """And runs ahead where the prediction is against it."""
    model = tiny_llama()
    drafter = Chance(outputs(generate(model, PROMPTS)), 0.7)
    for found in (None, profile_of(3.0)):
        monkeypatch.setattr(execution, "find_profile", lambda *_, found=found: found)
        config = {"specactor": {"decoupled_execution": "always"}}
        statistics = [generate(model, PROMPTS, drafter=drafter, config=config).statistics for _ in range(2)]
        assert all(each.total.accepted > 0 for each in statistics)
    assert len(made) == 4


def test_auto_shares_no_gpu(made, monkeypatch) -> None:
    model, config = tiny_llama(), {"specactor": {"decoupled_execution": "auto"}, "draft_length": 4}
    monkeypatch.setattr(execution, "find_profile", lambda *_: profile_of(0.2))
    drafter = Chance(outputs(generate(model, PROMPTS)), 1.0)
    drafter.has_probabilities = True
    generate(model, PROMPTS, drafter=drafter, config=config)  # its acceptance is known from here on
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(LlamaForCausalLM, "device", torch.device(device))
        call = SimpleNamespace(model=model, config=SpeculativeConfig(**config), media=None, rejects=False, longest=99)
        execution.decoupled([drafter], call, 4)
        assert len(made) == (device == "cpu")


def test_training_is_the_same(tmp_path: Path) -> None:
    """The copy is requantized before each rollout, by the thread that drafts with it."""
    run = train(tmp_path, "self", specactor=dict(decoupled_execution="always"))
    assert_same_training(run, train_plainly())
    assert run.metric("rollout/acceptance_rate")[0] > 0.3 and run.refreshed
