"""Drafters of every kind that can learn."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from spec_trl.generation.drafters.trainable_drafter import TrainableDrafter


@pytest.fixture
def named(tiny_assistant: PreTrainedModel, checkpoints: dict[str, str]) -> dict[str, Any]:
    """`assistant_model` of each kind."""
    return {"self": None, "model": tiny_assistant, **checkpoints}


@pytest.fixture
def student(drafters: Any) -> Callable[[str], TrainableDrafter]:
    """Makes a drafter of a kind, whose weights are nobody else's."""
    return lambda kind: drafters(f"tts {kind} run")[0].student
