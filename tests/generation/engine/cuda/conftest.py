"""What tests of captured forwards share."""

import pytest
from torch import nn

from tests.conftest import tiny_llama


@pytest.fixture
def fresh() -> nn.Module:
    """A target of the test's own, of one layer: a tape is slow."""
    return tiny_llama(num_hidden_layers=1)
