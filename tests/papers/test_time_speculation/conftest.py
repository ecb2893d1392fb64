"""Drafters that learn, in prices under which they do."""

import pytest

from spec_trl.papers.test_time_speculation import update_stride
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions


@pytest.fixture
def make(student):
    """A drafter of a kind, that learns as it is told."""
    return lambda kind, **how: DistilledDrafter(student(kind), TTSOptions(learning_rate=1e-3, **{"stride": 1} | how))


@pytest.fixture
def cheap(monkeypatch) -> None:
    """An update is expected to gain much, and trials may take all the time."""
    monkeypatch.setattr(update_stride, "UPDATES", 1)
    monkeypatch.setattr(update_stride, "TRIAL", 100.0)
