"""Drafters of every kind that can learn."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from spec_trl.generation.drafters.canvas import TrainableDrafter
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter


@pytest.fixture
def named(tiny_assistant: PreTrainedModel, checkpoints: dict[str, str]) -> dict[str, Any]:
    """`assistant_model` of each kind."""
    return {"self": None, "model": tiny_assistant, **checkpoints}


@pytest.fixture
def student(
    tiny: PreTrainedModel, tiny_assistant: PreTrainedModel, checkpoints: dict[str, str]
) -> Callable[[str], TrainableDrafter]:
    """Makes a drafter of a kind, whose weights are nobody else's."""

    def make(kind: str) -> TrainableDrafter:
        if kind == "self":
            return SelfDrafter(tiny, "rtn-w4-g32", "reference", "packed")
        if kind == "model":
            return SmallModelDrafter(copy.deepcopy(tiny_assistant), tiny)
        return (Eagle3Drafter if kind == "eagle3" else DFlashDrafter)(checkpoints[kind], tiny)

    return make
