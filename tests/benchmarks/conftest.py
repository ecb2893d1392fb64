"""A tiny shape that tests of the benchmarks share."""

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.models import build, shape_config


@pytest.fixture(scope="session")
def shape() -> PreTrainedModel:
    """shape:tiny in float64, whose 4-bit copy agrees with it often, not always. No test may change it."""
    return build(shape_config("tiny"), 0.04, 0, torch.float64, "cpu")
