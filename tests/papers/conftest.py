"""The fixtures of the core's tests, for drafters that a paper's room adds."""

from tests.generation.conftest import checkpoints, clock, drafters, replays, tape
from tests.generation.drafters.conftest import named, student


__all__ = ["checkpoints", "clock", "drafters", "named", "replays", "student", "tape"]
