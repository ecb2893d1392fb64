"""Batched, lossless speculative decoding for transformers, and fast rollouts for TRL.

Importing this package teaches `model.generate` the keyword `assistant_strategy`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .generation.engine.drafter import Drafter
from .generation.engine.network.swap import explain
from .generation.engine.sampling.accept import Proposal
from .generation.generate import SpeculativeOutput, install, speculative_decoding, uninstall
from .generation.options import SpeculativeConfig
from .generation.registry import register_drafter
from .generation.session import release
from .generation.strategies import refresh


if TYPE_CHECKING:
    from .trainers.spec_distillation_trainer import SpecDistillationConfig, SpecDistillationTrainer
    from .trainers.spec_gmpo_trainer import SpecGMPOConfig, SpecGMPOTrainer
    from .trainers.spec_grpo_config import SpecGRPOConfig
    from .trainers.spec_grpo_trainer import SpecGRPOTrainer
    from .trainers.spec_rloo_trainer import SpecRLOOConfig, SpecRLOOTrainer
    from .trainers.speculation import speculate


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
    "speculate",
    "speculative_decoding",
    "uninstall",
]
# Imported on first access: they import TRL, datasets and peft, which generate does not need. GMPO is in TRL's
# experimental part, which another TRL may not have.
_TRAINERS = {
    "SpecDistillationConfig": "spec_distillation_trainer",
    "SpecDistillationTrainer": "spec_distillation_trainer",
    "SpecGMPOConfig": "spec_gmpo_trainer",
    "SpecGMPOTrainer": "spec_gmpo_trainer",
    "SpecGRPOConfig": "spec_grpo_config",
    "SpecGRPOTrainer": "spec_grpo_trainer",
    "SpecRLOOConfig": "spec_rloo_trainer",
    "SpecRLOOTrainer": "spec_rloo_trainer",
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
