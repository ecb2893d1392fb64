"""Batched, lossless speculative decoding for transformers, and fast GRPO rollouts for TRL.

Importing this package teaches `model.generate` the keyword `assistant_strategy`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .generation.configuration import SpeculativeConfig
from .generation.engine.accept import Proposal
from .generation.engine.drafter import Drafter
from .generation.generate import SpeculativeOutput, install, speculative_decoding, uninstall
from .generation.registry import register_drafter
from .generation.session import release
from .generation.strategies import refresh


if TYPE_CHECKING:
    from .trainers.spec_grpo_config import SpecGRPOConfig
    from .trainers.spec_grpo_trainer import SpecGRPOTrainer
    from .trainers.speculation import speculate


__all__ = [
    "Drafter",
    "Proposal",
    "SpecGRPOConfig",
    "SpecGRPOTrainer",
    "SpeculativeConfig",
    "SpeculativeOutput",
    "install",
    "refresh",
    "register_drafter",
    "release",
    "speculate",
    "speculative_decoding",
    "uninstall",
]
# Imported on first access: they import TRL, datasets and peft, which generate does not need.
_TRAINERS = {
    "SpecGRPOConfig": "spec_grpo_config",
    "SpecGRPOTrainer": "spec_grpo_trainer",
    "speculate": "speculation",
}


def __getattr__(name: str) -> Any:
    if name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".trainers.{_TRAINERS[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
