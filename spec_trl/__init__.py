"""Batched, lossless speculative decoding for transformers, and fast GRPO rollouts for TRL.

Importing this package teaches `model.generate` the keyword `assistant_strategy`.
"""

from .generation.configuration import SpeculativeConfig
from .generation.graphs import release
from .generation.integration import SpeculativeOutput, install, speculative_decoding, uninstall
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
