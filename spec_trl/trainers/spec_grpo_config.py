"""GRPOConfig and the options of speculative rollouts."""

from dataclasses import dataclass

from trl import GRPOConfig

from .rollout_options import RolloutOptions


@dataclass
class SpecGRPOConfig(RolloutOptions, GRPOConfig):
    """
    Configuration class for the [`SpecGRPOTrainer`]: the options of [`~trl.GRPOConfig`], and those that say how
    rollouts are drafted and verified.
    """

    base_trainer = "trl.GRPOTrainer"
