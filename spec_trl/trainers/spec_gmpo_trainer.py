"""GMPOTrainer of TRL's experimental part with speculative rollouts."""

from dataclasses import dataclass

from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from .rollout_options import RolloutOptions
from .spec_grpo_trainer import SpecGRPOTrainer


@dataclass
class SpecGMPOConfig(RolloutOptions, GMPOConfig):
    """Options of [`~trl.experimental.gmpo.GMPOConfig`], and those that say how rollouts are drafted and verified."""

    base_trainer = "trl.experimental.gmpo.GMPOTrainer"


class SpecGMPOTrainer(SpecGRPOTrainer, GMPOTrainer):
    """[`~trl.experimental.gmpo.GMPOTrainer`] with lossless speculative rollouts, as in `SpecGRPOTrainer`. It takes
    GMPOTrainer's arguments, with a [`SpecGMPOConfig`] as `args`.

    Raises:
        ValueError: `args` is no SpecGMPOConfig, or a rollout of this model under `args` would fail.
    """

    _tag_names = ["trl", "gmpo", "spec_trl"]
    config_class = SpecGMPOConfig
