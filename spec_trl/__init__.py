"""Batched, lossless speculative decoding for transformers, and fast GRPO rollouts for TRL.

Importing this package teaches `model.generate` the keyword `assistant_strategy`.
"""

from .generation.configuration import SpeculativeConfig
from .generation.integration import SpeculativeOutput, install, speculative_decoding, uninstall
from .generation.strategies import release
from .trainers.spec_grpo_config import SpecGRPOConfig
from .trainers.spec_grpo_trainer import SpecGRPOTrainer


__all__ = [
    "SpecGRPOConfig",
    "SpecGRPOTrainer",
    "SpeculativeConfig",
    "SpeculativeOutput",
    "install",
    "release",
    "speculative_decoding",
    "uninstall",
]

install()
