"""GRPOTrainer whose rollouts are speculative and token-identical to plain sampling."""

from typing import Any

from trl import GRPOTrainer

from .sampler_mismatch import SamplerMismatch
from .spec_grpo_config import SpecGRPOConfig
from .speculative_rollouts import SpeculativeRollouts


class SpecGRPOTrainer(SpeculativeRollouts, GRPOTrainer):
    """[`~trl.GRPOTrainer`] with lossless speculative rollouts (EfficientRollout, Algorithm 1).

    The drafter follows the policy. In every decoding round the times of earlier rounds, and a calibrated roofline if
    there is one, decide whether to draft; a controller adapts the draft length to the block efficiency. Rollouts and
    steps are logged in `output_dir/rollout_log.jsonl`, which `spec-trl report` draws; `train` ends with a line that
    says whether drafting helped. With exact verification completions, losses and weights are those of
    `assistant_strategy="none"`. With a `rollout_func`, which generates by itself, nothing is drafted.

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
        self._mismatch = SamplerMismatch(self.accelerator, self.args, self._processors)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, self._mismatch.for_the_loss(inputs), *args, **kwargs)
        for name, value in self._mismatch.metrics(inputs).items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._mismatch.forward = scores[0].detach()
        return scores

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *rest: Any, **more: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        completions = self._sample(prompt_ids, images, multimodal_fields)
        logprobs = [sampled.logprobs for sampled in completions]  # TRL puts zeros where tools answer, and pads
        return [sampled.tokens for sampled in completions], logprobs if self._mismatch.is_logged else None
