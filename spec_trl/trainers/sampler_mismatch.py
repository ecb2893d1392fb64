"""Measures distances between log-probabilities of sampler and training, under TRL's names for vLLM."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import LogitsProcessor, SuppressTokensLogitsProcessor, TemperatureLogitsWarper
from trl import GRPOConfig


SAMPLED = "sampling_per_token_logps"
"""TRL's name of the sampler's log-probabilities among the inputs of a loss: `[B, n]` float32, 0 as padding."""


class SamplerMismatch:
    """Compares log-probabilities of sampler and training in a micro-batch, and hides the sampler's from TRL's loss.

    Args:
        processors: of rollouts; None: a `rollout_func` generates.

    Attributes:
        is_logged: whether both can be compared.
        forward: `[B, n]`, log-probabilities (nats) of completions by the newest forward; set after each forward.
    """

    def __init__(
        self, accelerator: Accelerator, args: GRPOConfig, processors: Iterable[LogitsProcessor] | None
    ) -> None:
        self._accelerator = accelerator
        # As TRL logs it of vLLM: the ratio of a completion is the product over its tokens.
        self._by_sequence = args.vllm_importance_sampling_mode.startswith("sequence")
        # Models that read media never write their tokens, which the forward of TRL's loss gives a probability: the
        # distance shows how much.
        drawn = [one for one in processors or () if type(one) is not SuppressTokensLogitsProcessor]
        self.is_logged = processors is not None and is_comparable(drawn, args.temperature)
        self.forward: Tensor | None = None

    def for_the_loss(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the next loss without the sampler's log-probabilities: TRL would mask by them under
        `off_policy_mask_threshold`, and the log would change the loss."""
        self.forward = None
        return {name: value for name, value in inputs.items() if name != SAMPLED} if self.is_logged else inputs

    def metrics(self, inputs: dict[str, Any]) -> dict[str, float]:
        """Metrics of a micro-batch over all ranks, after its loss; empty without counted tokens. All ranks call it.
        `old_per_token_logps` `[B, n]` in `inputs` replace the newest forward: the policy may have changed since it
        sampled."""
        policy, sampled = inputs.get("old_per_token_logps", self.forward), inputs.get(SAMPLED)
        if not self.is_logged or policy is None or sampled is None:
            return {}
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()  # [B, n]
        change = (policy - sampled).masked_fill(~mask, 0)  # [B, n]
        distances = change.abs()[mask]  # [tokens]
        ratios = (change.sum(1)[mask.any(1)] if self._by_sequence else change[mask]).exp()
        zero = ratios.new_zeros(1)  # no token of this rank may count
        sums = [distances.sum(), zero.new_tensor(len(distances)), ratios.sum(), zero.new_tensor(len(ratios))]
        most = [torch.cat([zero, distances]).max(), torch.cat([zero, ratios]).max()]
        least = torch.cat([zero + torch.inf, ratios]).min()
        ranks: Tensor = self._accelerator.gather(torch.stack([*sums, *most, least])[None])  # [ranks, 7]
        distance, tokens, ratio, count = ranks[:, :4].sum(0).tolist()
        if not tokens:
            return {}
        return {
            "sampling/sampling_logp_difference/mean": distance / tokens,
            "sampling/sampling_logp_difference/max": ranks[:, 4].max().item(),
            "sampling/importance_sampling_ratio/mean": ratio / count,
            "sampling/importance_sampling_ratio/max": ranks[:, 5].max().item(),
            "sampling/importance_sampling_ratio/min": ranks[:, 6].min().item(),
        }


def is_comparable(processors: Iterable[LogitsProcessor], temperature: float) -> bool:
    """Whether tokens are drawn from the policy's distribution at `temperature` over the whole vocabulary, as TRL's
    loss assumes. Any other processor (top-p, a penalty, a minimum length) changes it."""
    drawn_at = 1.0
    for processor in processors:
        if type(processor) is not TemperatureLogitsWarper:
            return False
        drawn_at = processor.temperature
    return drawn_at == temperature
