"""Defines TRL's on-policy trainers with speculative rollouts, and their configs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ..distributed.shared_rollouts import Sampled
from .rollout_options import RolloutOptions
from .speculative_rollouts import SpeculativeRollouts


# ---- GRPO -----------------------------------------------------------------------------------------------------------


@dataclass
class SpecGRPOConfig(RolloutOptions, GRPOConfig):
    """
    Configuration class for the [`SpecGRPOTrainer`]: the options of [`~trl.GRPOConfig`], and those that say how
    rollouts are drafted and verified.
    """

    base_trainer = "trl.GRPOTrainer"


class SpecGRPOTrainer(SpeculativeRollouts, GRPOTrainer):
    """[`~trl.GRPOTrainer`] with lossless speculative rollouts (EfficientRollout, Algorithm 1).

    The drafter follows the policy. In every decoding round the planner decides by the times of earlier rounds, and a
    calibrated roofline if there is one, whether to draft and how far. Rollouts and steps are logged in
    `output_dir/rollout_log.jsonl`, which `spec-trl report` draws; `output_dir/certificate.json` says how far sampler
    and loss were apart; `train` ends with a line that says whether drafting helped. With exact verification
    completions, losses and weights are those of `assistant_strategy="none"`. With a `rollout_func`, which generates by
    itself, nothing is drafted.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or `PeftModel`): the policy.
        reward_funcs: as in GRPOTrainer.
        args ([`SpecGRPOConfig`], *optional*): configuration.
        rest, kwargs: GRPOTrainer's other arguments.

    Raises:
        ValueError: `args` is no SpecGRPOConfig, or a rollout of this model under `args` would fail.
    """

    _tag_names = ["trl", "grpo", "spec_trl"]
    config_class = SpecGRPOConfig

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: SpecGRPOConfig | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        super().__init__(model, reward_funcs, args, *rest, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, self._mismatch.for_the_loss(inputs), *args, **kwargs)
        self._log_mismatch(self._mismatch.metrics(inputs, self.model.training))
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._mismatch.forward = scores[0].detach()
        return scores

    def _in_turn(self, completions: list[Sampled]) -> tuple[list[list[int]], list[list[float]] | None]:
        logprobs = [sampled.logprobs for sampled in completions]  # TRL puts zeros where tools answer, and pads
        return [sampled.tokens for sampled in completions], logprobs if self._mismatch.is_logged else None


# ---- RLOO and distillation ------------------------------------------------------------------------------------------


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
        self._sampled: list[Tensor] = []  # log-probabilities of a rollout's completions, [tokens] each, not compared

    def _in_turn(self, completions: list[Sampled]) -> Any:
        self._sampled = [torch.tensor(sampled.logprobs) for sampled in completions]
        return super()._in_turn(completions)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        scores = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)
        sampled, self._sampled = self._sampled, []
        # TRL drops the sampler's. Its first scores after a rollout are the old policy's, of all rows in their order.
        if sampled and self._mismatch.is_logged:
            mask = attention_mask[:, -scores[0].shape[1] :]  # [B, n]
            padded = torch.zeros(scores[0].shape)  # [B, n]
            for row, logprobs in zip(padded, sampled, strict=True):
                row[: len(logprobs)] = logprobs
            padded = padded.to(mask.device)
            self._log_mismatch(self._mismatch.compare(scores[0], padded, mask, self.model.training))
        return scores


@dataclass
class SpecDistillationConfig(RolloutOptions, DistillationConfig):
    """Options of [`~trl.DistillationConfig`], and those that say how rollouts are drafted and verified."""

    base_trainer = "trl.DistillationTrainer"
    other_engines = ("use_vllm", "use_transformers_continuous_batching")


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


# ---- GMPO, which is in TRL's experimental part: another TRL may not have it, and importing it warns -----------------


def _gmpo() -> tuple[type, type]:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    @dataclass
    class SpecGMPOConfig(RolloutOptions, GMPOConfig):
        """Options of [`~trl.experimental.gmpo.GMPOConfig`], and those that say how rollouts are drafted and
        verified."""

        __qualname__ = "SpecGMPOConfig"
        base_trainer = "trl.experimental.gmpo.GMPOTrainer"

    class SpecGMPOTrainer(SpecGRPOTrainer, GMPOTrainer):
        """[`~trl.experimental.gmpo.GMPOTrainer`] with lossless speculative rollouts, as in `SpecGRPOTrainer`. It
        takes GMPOTrainer's arguments, with a [`SpecGMPOConfig`] as `args`.

        Raises:
            ValueError: `args` is no SpecGMPOConfig, or a rollout of this model under `args` would fail.
        """

        __qualname__ = "SpecGMPOTrainer"
        _tag_names = ["trl", "gmpo", "spec_trl"]
        config_class = SpecGMPOConfig

    return SpecGMPOConfig, SpecGMPOTrainer


def __getattr__(name: str) -> Any:
    if name not in ("SpecGMPOConfig", "SpecGMPOTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["SpecGMPOConfig"], globals()["SpecGMPOTrainer"] = _gmpo()
    return globals()[name]
