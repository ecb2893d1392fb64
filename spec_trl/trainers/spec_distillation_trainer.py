"""DistillationTrainer with speculative rollouts."""

from dataclasses import dataclass
from typing import Any

from trl import DistillationConfig, DistillationTrainer

from .rollout_options import RolloutOptions
from .speculative_rollouts import SpeculativeRollouts


@dataclass
class SpecDistillationConfig(RolloutOptions, DistillationConfig):
    """Options of [`~trl.DistillationConfig`], and those that say how rollouts are drafted and verified."""

    base_trainer = "trl.DistillationTrainer"


class SpecDistillationTrainer(SpeculativeRollouts, DistillationTrainer):
    """[`~trl.DistillationTrainer`] with lossless speculative rollouts of the student, as in `SpecGRPOTrainer`. It
    takes DistillationTrainer's arguments, with a [`SpecDistillationConfig`] as `args`.

    Raises:
        ValueError: `args` is no SpecDistillationConfig, or a rollout of this model under `args` would fail.
    """

    _tag_names = ["trl", "distillation", "spec_trl"]
    config_class = SpecDistillationConfig
    lacking = ("_calculate_rewards", "_get_per_token_logps_and_entropies", "aux_loss_enabled", "rollout_func")

    def __init__(
        self, model: Any, teacher_model: Any = None, args: SpecDistillationConfig | None = None,
        *rest: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, teacher_model, args, *rest, **kwargs)
