"""Measures distances between log-probabilities of sampler and training, under TRL's names for vLLM."""

from collections.abc import Iterable
from math import isnan
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trl import GRPOConfig


SAMPLED = "sampling_per_token_logps"
"""TRL's name of the sampler's log-probabilities among the inputs of a loss: `[B, n]` float32, 0 as padding."""
FILTERS = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""They change nothing but the support: they keep some tokens."""
_NAMES = ("sampling/sampling_logp_difference", "sampling/importance_sampling_ratio")
_OF_TRUNCATION = ("sampling/truncation_logp_difference", "sampling/truncation_ratio")
FAR = 0.1
"""A token's ratio that is farther from 1 is counted in the log of a truncation."""


class SamplerMismatch:
    """Compares log-probabilities of sampler and training in a micro-batch, and hides the sampler's from TRL's loss.
    Where only filters set them apart, the log has other names: it shows what the filters cut.

    Args:
        processors: of rollouts; None: vLLM or a `rollout_func` generates.
        scores: whether the loss reads log-probabilities of the sampled tokens.

    Attributes:
        not_compared: why both are not of the same distribution; None: they are.
        is_logged: whether metrics of their distance are logged.
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
        over_support = args.logprobs_over == "support"
        other = changed_by(drawn, args.temperature, FILTERS if over_support else ())
        self.not_compared = None if other is None else f"{other} changes the distribution"
        is_filtered = other is not None and changed_by(drawn, args.temperature, FILTERS) is None
        self._is_truncation = is_filtered and scores and processors is not None
        if processors is None:
            self.not_compared = "vLLM or a rollout_func generates"
        if not scores:
            self.not_compared = "the loss reads no log-probabilities of sampled tokens"
        self.is_logged = self.not_compared is None or self._is_truncation
        self.forward: Tensor | None = None

    def for_the_loss(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the next loss without the sampler's log-probabilities: TRL would mask by them under
        `off_policy_mask_threshold`, and the log would change the loss."""
        self.forward = None
        return {name: value for name, value in inputs.items() if name != SAMPLED} if self.is_logged else inputs

    def metrics(self, inputs: dict[str, Any], trains: bool) -> dict[str, float]:
        """Metrics of a micro-batch over all ranks, after its loss (:meth:`compare`). `old_per_token_logps` `[B, n]` in
        `inputs` replace the newest forward: the policy may have changed since it sampled."""
        policy, sampled = inputs.get("old_per_token_logps", self.forward), inputs.get(SAMPLED)
        if not self.is_logged or policy is None or sampled is None:
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
        by_sequence = self._by_sequence and not self._is_truncation  # whose distances would add up over a completion
        ratios = (change.sum(1)[mask.any(1)] if by_sequence else change[mask]).exp()
        zero = ratios.new_zeros(1)  # no token of this rank may count
        sums = [distances.sum(), zero.new_tensor(len(distances)), ratios.sum(), zero.new_tensor(len(ratios))]
        sums.append(((ratios - 1).abs() > FAR).sum())
        most = [torch.cat([zero, distances]).max(), torch.cat([zero, ratios]).max()]
        least = torch.cat([zero + torch.inf, ratios]).min()
        ranks: Tensor = self._accelerator.gather(torch.stack([*sums, *most, least])[None])  # [ranks, 8]
        distance, tokens, ratio, count, far = ranks[:, :5].sum(0).tolist()
        if not tokens:
            return {}
        largest = ranks[:, 5].max().item()
        if trains and not self._is_truncation:
            is_first = self._largest is None or isnan(largest)  # NaN stays the largest
            self._largest = largest if is_first else max(self._largest or 0.0, largest)
            self._compared += int(tokens)
        of_distance, of_ratio = _OF_TRUNCATION if self._is_truncation else _NAMES
        found = {
            f"{of_distance}/mean": distance / tokens,
            f"{of_distance}/max": largest,
            f"{of_ratio}/mean": ratio / count,
            f"{of_ratio}/max": ranks[:, 6].max().item(),
            f"{of_ratio}/min": ranks[:, 7].min().item(),
        }
        return found | {f"{of_ratio}/far": far / count} if self._is_truncation else found

    def take(self) -> tuple[float | None, int]:
        """Returns the largest distance since the last call, None without a token, and the number of tokens."""
        taken, self._largest, self._compared = (self._largest, self._compared), None, 0
        return taken


def changed_by(
    processors: Iterable[LogitsProcessor], temperature: float, besides: tuple[type[LogitsProcessor], ...] = ()
) -> str | None:
    """Names what draws tokens from another distribution than the policy's at `temperature` over the whole vocabulary,
    which TRL's loss assumes: a processor such as top-p, a penalty or a minimum length, but for those `besides`. None:
    nothing does."""
    drawn_at = 1.0
    for processor in processors:
        if type(processor) is TemperatureLogitsWarper:
            drawn_at = processor.temperature
        elif type(processor) not in besides:
            return type(processor).__name__
    return None if drawn_at == temperature else f"a temperature of {drawn_at} (the loss's is {temperature})"
