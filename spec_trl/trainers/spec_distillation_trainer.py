"""DistillationTrainer with speculative rollouts."""

from dataclasses import dataclass
from typing import Any

from trl import DistillationConfig, DistillationTrainer

from ..generation.options import document
from .rollout_options import RolloutOptions
from .speculative_rollouts import SpeculativeRollouts


@dataclass
class SpecDistillationConfig(RolloutOptions, DistillationConfig):
    """Options of [`~trl.DistillationConfig`], and those that say how rollouts are drafted and verified."""

    _VALID_DICT_FIELDS = [*DistillationConfig._VALID_DICT_FIELDS, "best_of_n_assistants"]
    base_trainer = "trl.DistillationTrainer"


document(SpecDistillationConfig, RolloutOptions)


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
