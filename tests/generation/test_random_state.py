"""The seed of a call is the one number that a rollout draws from the global generators, whoever drafts."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from spec_trl import release
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.sampling.noise import keeping_generators
from spec_trl.generation.registry import CHOOSING
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.option_groups import merged
from tests.tiny_families import make
from tests.trainers.harness import assert_same_training, hybrid_policy, train, train_plainly


PROMPTS = pad_left(random_rows([7, 4]))


def numbers() -> tuple[float, float, float]:
    """What the generators draw next."""
    return float(torch.rand(())), np.random.random(), random.random()


def seeded(model: PreTrainedModel, *call: Any, **options: Any) -> tuple[list[list[int]], tuple[float, float, float]]:
    """Tokens of a first call, sampled, and what is drawn after it."""
    release(model)
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    strategy, config = call
    result = generate(model, PROMPTS, strategy, config | {"seed": None}, **options)
    assert result.statistics.total.drafted > 0 or strategy in ("none", *CHOOSING)
    assert result.statistics.drafter_failure is None
    return outputs(result), numbers()


@pytest.fixture(scope="module")
def assistants(tmp_path_factory: pytest.TempPathFactory, checkpoints) -> dict[str, Any]:
    """Assistants as callers name them. The weights of "folder" are drawn before they are read."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = make("qwen3_5_text")
    model.save_pretrained(folder)
    return checkpoints | {"module": model, "folder": str(folder)}


@pytest.mark.parametrize(
    ("strategy", "assistant", "config"),
    [
        *(("self", None, {"draft_quantization": name}) for name in ("rtn-w4-g32", "rtn-w8", "awq-w4-g32")),
        ("model", "module", {}), ("model", "folder", {}), ("ngram", None, {}), ("history", None, {}),
        *((kind, kind, {}) for kind in ("eagle3", "dflash", "mtp")),
        ("tts", None, {"tts": {"drafter": "self", "stride": 1}}),
        ("tts", "dflash", {"tts": {"drafter": "dflash", "stride": 1}}),
        ("auto", "folder", {}),
        ("best_of_n", "dict", {"specactor": {"drafters": ("model", "ngram"), "race": False}}),
    ],
)  # fmt: skip
def test_drafting_draws_nothing(strategy: str, assistant: str | None, config: dict, tiny, assistants) -> None:
    given = {"specactor": {"assistants": {"model": assistants["folder"]}}} if assistant == "dict" else {}
    config = merged(config, given)
    options = {} if assistant in (None, "dict") else {"assistant_model": assistants[assistant]}
    assert seeded(tiny, strategy, config, **options) == seeded(tiny, "none", {})


def test_a_drafter_that_draws_as_it_is_made_moves_no_generator(fresh: LlamaForCausalLM, monkeypatch) -> None:
    """Of torch, numpy and `random`; and one that fails to be made neither."""
    make_one = SelfDrafter.make

    def drawing(*arguments: Any) -> Any:
        numbers()
        return make_one(*arguments)

    expected = seeded(fresh, "self", {})
    monkeypatch.setattr(SelfDrafter, "make", drawing)
    assert seeded(fresh, "self", {}) == expected
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), keeping_generators():
        numbers()
        raise ZeroDivisionError
    assert torch.equal(before, torch.get_rng_state())


def test_a_trainer_with_an_assistant_trains_as_without_one(tmp_path: Path, assistants) -> None:
    """TRL shuffles the generation batch after the rollout in which drafters are made."""
    folder = tmp_path / "assistant"
    hybrid_policy().save_pretrained(folder)
    options = dict(steps_per_generation=4, per_device_train_batch_size=4, max_steps=4)
    run = train(tmp_path / "run", "model", assistant_model=str(folder), **options)
    assert_same_training(run, train_plainly(**options))
    assert run.log.rollouts[0].drafter == "model"
