"""Learned drafters by name: in `generate`, under captured forwards, two at once, and in training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spec_trl import release
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.engine import captured
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.dflash import reference as dflash_reference
from tests.generation.drafters.eagle3 import reference as eagle3_reference
from tests.generation.engine.tape import Tape
from tests.trainers.harness import assert_same_training, tiny_policy, train


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
STRATEGIES = ["eagle3", "dflash"]


def make_checkpoint(folder: Path, strategy: str, vocabulary: int = 64) -> str:
    """A random drafter for a target of two layers and 64 hidden dimensions."""
    if strategy == "eagle3":
        config = eagle3_reference.safeai(vocab_size=vocabulary, draft_vocab_size=vocabulary)
        eagle3_reference.make_folder(folder, config)
    else:
        dflash_reference.make_checkpoint(folder, dflash_reference.zlab(vocab_size=vocabulary))
    return str(folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_by_name(strategy: str, tiny, tmp_path) -> None:
    checkpoint = make_checkpoint(tmp_path, strategy)
    for options in ({}, {"do_sample": False}):
        result = generate(tiny, PROMPTS, strategy, assistant_model=checkpoint, max_new_tokens=40, **options)
        assert outputs(result) == outputs(generate(tiny, PROMPTS, max_new_tokens=40, **options))
        assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 0
        assert result.statistics.strategy == strategy


@pytest.mark.parametrize(
    ("strategy", "runner"),
    [("eagle3", "graph"), ("dflash", "graph"), pytest.param("dflash", "compiled", marks=pytest.mark.slow)],
)
def test_under_captured_forwards(strategy: str, runner: str, tiny, tmp_path, monkeypatch) -> None:
    """The features come out of the captured target: the same drafts, of which the same are accepted."""
    tape, compile_ = Tape(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    checkpoint = make_checkpoint(tmp_path, strategy)
    options = dict(assistant_model=checkpoint, max_new_tokens=40)
    expected = generate(tiny, PROMPTS, strategy, {"draft_length": 3}, **options)
    monkeypatch.setattr(captured, "recorder_for", lambda device: tape)
    for _ in range(2):  # captured, then kept
        generate(tiny, PROMPTS, "none", {"runner": runner}, max_new_tokens=40)
        result = generate(tiny, PROMPTS, strategy, {"draft_length": 3, "runner": runner}, **options)
        assert outputs(result) == outputs(expected)
        assert result.statistics.total == expected.statistics.total
    assert tape.replayed > 40
    release(tiny)


def test_two_at_once(tiny, tmp_path) -> None:
    """One runner tells both, each what it reads: they draft in turns, each as if alone."""

    class InTurns(AlwaysSpeculate):
        rounds = 0

        def __init__(self) -> None:
            super().__init__(Candidate("either", 3, 3.0, 100))

        def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
            self.rounds += 1
            return self.rounds % 2, 3

        def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
            pass

    eagle = Eagle3Drafter(make_checkpoint(tmp_path / "eagle3", "eagle3"), tiny)
    dflash = DFlashDrafter(make_checkpoint(tmp_path / "dflash", "dflash"), tiny)
    for drafters in ([eagle, dflash], [dflash, eagle]):
        result = generate(tiny, PROMPTS, drafter=drafters, control=InTurns())
        assert outputs(result) == outputs(generate(tiny, PROMPTS)) and result.statistics.drafter_failure is None
        assert all(counts.drafted > 20 for counts in result.statistics.per_drafter.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_outgrow_a_drafter_are_refused_before_any_work(strategy: str, tiny, tmp_path, monkeypatch) -> None:
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changes = dict(max_position_embeddings=16, rope_scaling=scaling | {"original_max_position_embeddings": 8})
    if strategy == "eagle3":
        eagle3_reference.make_folder(tmp_path, eagle3_reference.safeai(**changes))
    else:
        dflash_reference.make_checkpoint(tmp_path, dflash_reference.zlab(**changes))
    monkeypatch.setattr(captured, "runner_for", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=r"rows can reach \d+ tokens.*positions reach 16.*Lower max_new_tokens"):
        generate(tiny, PROMPTS, strategy, assistant_model=str(tmp_path))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_is_needed(strategy: str, tiny) -> None:
    for assistant in (None, nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=f"drafter of kind '{strategy}': give the folder or hub id"):
            generate(tiny, PROMPTS, strategy, assistant_model=assistant)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training(strategy: str, tmp_path: Path) -> None:
    """It follows the policy as that learns, outside its optimizer: the same tokens, losses and weights as without."""
    vocabulary = tiny_policy().config.vocab_size
    options: dict[str, Any] = dict(assistant_model=make_checkpoint(tmp_path / "drafter", strategy, vocabulary))
    none, drafted = train(tmp_path, "none", max_steps=4), train(tmp_path, strategy, max_steps=4, **options)
    assert_same_training(none, drafted)
    assert len(drafted.metric("rollout/acceptance_rate")) == 4
