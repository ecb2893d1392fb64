"""Decodes batches without loss by speculative decoding in transformers, and speeds up rollouts in TRL.

Importing this package teaches `model.generate` the keyword `assistant_strategy`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .generation.engine.drafter import Drafter
from .generation.engine.network.swap import explain
from .generation.engine.sampling.accept import Proposal
from .generation.generate import SpeculativeOutput, speculative_decoding
from .generation.keyword import install, uninstall
from .generation.options import SpeculativeConfig
from .generation.registry import register_drafter
from .generation.session import release
from .generation.strategies import refresh


if TYPE_CHECKING:
    from .trainers.rollout_backend import rollout_backend
    from .trainers.speculation import speculate
    from .trainers.trainers import (
        SpecDistillationConfig,
        SpecDistillationTrainer,
        SpecGMPOConfig,
        SpecGMPOTrainer,
        SpecGRPOConfig,
        SpecGRPOTrainer,
        SpecRLOOConfig,
        SpecRLOOTrainer,
    )


__all__ = [
    "Drafter",
    "Proposal",
    "SpecDistillationConfig",
    "SpecDistillationTrainer",
    "SpecGMPOConfig",
    "SpecGMPOTrainer",
    "SpecGRPOConfig",
    "SpecGRPOTrainer",
    "SpecRLOOConfig",
    "SpecRLOOTrainer",
    "SpeculativeConfig",
    "SpeculativeOutput",
    "explain",
    "install",
    "refresh",
    "register_drafter",
    "release",
    "rollout_backend",
    "speculate",
    "speculative_decoding",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    # Trainers import TRL, datasets and peft; generate needs none of them.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = {"speculate": "speculation", "rollout_backend": "rollout_backend"}.get(name, "trainers")
    module = import_module(f".trainers.{place}", __name__)
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
