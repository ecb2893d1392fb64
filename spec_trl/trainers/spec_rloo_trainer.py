"""RLOOTrainer with speculative rollouts."""

from dataclasses import dataclass
from typing import Any

from trl import RLOOConfig, RLOOTrainer

from .rollout_options import RolloutOptions
from .speculative_rollouts import SpeculativeRollouts


@dataclass
class SpecRLOOConfig(RolloutOptions, RLOOConfig):
    """Options of [`~trl.RLOOConfig`], and those that say how rollouts are drafted and verified."""

    base_trainer = "trl.RLOOTrainer"


class SpecRLOOTrainer(SpeculativeRollouts, RLOOTrainer):
    """[`~trl.RLOOTrainer`] with lossless speculative rollouts, as in `SpecGRPOTrainer`. It takes RLOOTrainer's
    arguments, with a [`SpecRLOOConfig`] as `args`.

    Raises:
        ValueError: `args` is no SpecRLOOConfig, or a rollout of this model under `args` would fail.
    """

    _tag_names = ["trl", "rloo", "spec_trl"]
    config_class = SpecRLOOConfig
    lacking = ("_tool_call_loop", "rollout_func", "tools")

    def __init__(
        self, model: Any, reward_funcs: Any, args: SpecRLOOConfig | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
