"""What learns in a drafter: how fast, and how finely."""

import copy

import pytest

from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.drafters.tts.learners import CORRECTION_RATE
from tests.conftest import tiny_llama
from tests.generation.calls import generate, pad_left, random_rows


ALONE = pad_left(random_rows([9]))


@pytest.mark.parametrize("kind", ["self", "model", "eagle3", "dflash"])
def test_default_learning_rate(kind: str, student, tiny) -> None:
    """Less where the drafter is wider; relative to the layer where corrections learn."""
    drafter = DistilledDrafter(student(kind), Distillation(scope="run"))
    generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=4)
    expected = CORRECTION_RATE if kind == "self" else drafter.student.weight_rate / 64
    assert drafter.learner.learning_rate == expected


def test_bfloat16_weights_learn_at_small_rates(tiny) -> None:
    """Steps below the spacing of bfloat16 numbers add up on a wider copy."""
    target = tiny_llama().bfloat16()
    inner = SmallModelDrafter(copy.deepcopy(target), target)
    drafter = DistilledDrafter(inner, Distillation(1e-5, scope="run"))
    first = [parameter.detach().clone() for parameter in inner.network.parameters()]
    generate(target, ALONE, "tts", {"draft_length": 2}, drafter=drafter, max_new_tokens=60)
    # Alone, a step of 1e-5 is less than half the spacing at weights above 0.01.
    pairs = zip(first, inner.network.parameters(), strict=True)
    assert sum(int((before != after)[before.abs() > 0.01].sum()) for before, after in pairs) > 500
