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
        scores: whether the loss reads log-probabilities of the sampled tokens.

    Attributes:
        not_compared: why both cannot be compared; None: they can.
        forward: `[B, n]`, log-probabilities (nats) of completions by the newest forward; set after each forward.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        processors: Iterable[LogitsProcessor] | None,
        scores: bool = True,
    ) -> None:
        self._accelerator = accelerator
        # As TRL logs it of vLLM: the ratio of a completion is the product over its tokens. RLOO's loss has only that.
        self._by_sequence = getattr(args, "vllm_importance_sampling_mode", "sequence").startswith("sequence")
        self._largest: float | None = None  # of the step
        self._compared = 0  # tokens of the step
        # Models that read media never write their tokens, which the forward of TRL's loss gives a probability: the
        # distance shows how much.
        drawn = [one for one in processors or () if type(one) is not SuppressTokensLogitsProcessor]
        self.not_compared = changed_by(drawn, args.temperature)
        if processors is None:
            self.not_compared = "a rollout_func generates"
        if not scores:
            self.not_compared = "the loss reads no log-probabilities of sampled tokens"
        self.forward: Tensor | None = None

    def for_the_loss(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the next loss without the sampler's log-probabilities: TRL would mask by them under
        `off_policy_mask_threshold`, and the log would change the loss."""
        self.forward = None
        hides = self.not_compared is None
        return {name: value for name, value in inputs.items() if name != SAMPLED} if hides else inputs

    def metrics(self, inputs: dict[str, Any], trains: bool) -> dict[str, float]:
        """Metrics of a micro-batch over all ranks, after its loss (:meth:`compare`). `old_per_token_logps` `[B, n]` in
        `inputs` replace the newest forward: the policy may have changed since it sampled."""
        policy, sampled = inputs.get("old_per_token_logps", self.forward), inputs.get(SAMPLED)
        if self.not_compared is not None or policy is None or sampled is None:
            return {}
        return self.compare(policy, sampled, inputs["completion_mask"] * inputs.get("tool_mask", 1), trains)

    def compare(self, policy: Tensor, sampled: Tensor, mask: Tensor, trains: bool) -> dict[str, float]:
        """Metrics over all ranks, which all call it; empty without counted tokens.

        Args:
            policy, sampled: `[B, n]`, log-probabilities (nats) of the training and of the sampler.
            mask: `[B, n]`, 1 at tokens that count.
            trains: False: the tokens are those of an evaluation, no part of a step.
        """
        mask = mask.bool()  # [B, n]
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
        largest = ranks[:, 4].max().item()
        if trains:
            self._largest = largest if self._largest is None else max(self._largest, largest)
            self._compared += int(tokens)
        return {
            "sampling/sampling_logp_difference/mean": distance / tokens,
            "sampling/sampling_logp_difference/max": largest,
            "sampling/importance_sampling_ratio/mean": ratio / count,
            "sampling/importance_sampling_ratio/max": ranks[:, 5].max().item(),
            "sampling/importance_sampling_ratio/min": ranks[:, 6].min().item(),
        }


    def take(self) -> tuple[float | None, int]:
        """Returns the largest distance since the last call, None without a token, and the number of tokens."""
        taken, self._largest, self._compared = (self._largest, self._compared), None, 0
        return taken


def changed_by(processors: Iterable[LogitsProcessor], temperature: float) -> str | None:
    """Says what draws tokens from another distribution than the policy's at `temperature` over the whole vocabulary,
    which TRL's loss assumes: a processor such as top-p, a penalty or a minimum length. None: nothing does."""
    drawn_at = 1.0
    for processor in processors:
        if type(processor) is not TemperatureLogitsWarper:
            return f"{type(processor).__name__} changes the distribution"
        drawn_at = processor.temperature
    return None if drawn_at == temperature else f"the sampler's temperature is {drawn_at}, the loss's {temperature}"
