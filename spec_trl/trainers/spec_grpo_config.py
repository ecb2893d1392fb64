"""GRPOConfig and the options of speculative rollouts."""

from dataclasses import dataclass

from trl import GRPOConfig

from ..generation.options import document
from .rollout_options import RolloutOptions


@dataclass
class SpecGRPOConfig(RolloutOptions, GRPOConfig):
    """
    Configuration class for the [`SpecGRPOTrainer`]: the options of [`~trl.GRPOConfig`], and those that say how
    rollouts are drafted and verified.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "best_of_n_assistants"]
    base_trainer = "trl.GRPOTrainer"


document(SpecGRPOConfig, RolloutOptions)
