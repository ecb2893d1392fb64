"""Describes a cluster to simulate: times of workers, acceptance of drafters, lengths of requests.

All are assumptions of the caller; nothing is fitted here.
"""

import math
import random
from dataclasses import dataclass

from ...generation.planner.clock import AffineSeconds
from ...value_checks import require_field


_MOST_SECONDS, _MOST_WORKERS = 1e6, 1024
_MOST_WORK = 12_000_000  # 1,280,000, or 6 s, in the paper's clusters


@dataclass(frozen=True)
class TargetModel:
    """A forward of the target on the GPUs of one worker."""

    fixed_seconds: float  # β: reading the weights, and launches
    token_seconds: float  # arithmetic, for each token that is decoded or verified
    cached_token_seconds: float  # reading K/V, for each cached token of each request

    def __post_init__(self) -> None:
        require_field(self, "fixed_seconds", above=1e-5, most=_MOST_SECONDS)
        for name in ("token_seconds", "cached_token_seconds"):
            require_field(self, name, most=_MOST_SECONDS)

    def seconds(self, positions: int, length: float) -> AffineSeconds:
        """V over `positions` tokens per request with `length` cached tokens."""
        return AffineSeconds(positions * self.token_seconds + length * self.cached_token_seconds, self.fixed_seconds)


@dataclass(frozen=True)
class DrafterModel:
    """A drafting method on one GPU."""

    name: str
    fixed_seconds: float  # α
    request_seconds: float  # D': arithmetic and sampling, per request
    cached_token_seconds: float  # reading K/V, for each cached token of each request
    acceptance: float  # mean of p over requests, 0 to 1
    spread: float  # standard deviation of p over requests
    uncaptured_seconds: float = 0.0  # that a step takes in addition in the baselines, without capture

    def __post_init__(self) -> None:
        require_field(self, "fixed_seconds", above=1e-5, most=_MOST_SECONDS)
        for name in ("request_seconds", "cached_token_seconds", "uncaptured_seconds"):
            require_field(self, name, most=_MOST_SECONDS)
        require_field(self, "acceptance", above=0.0, most=1.0)
        require_field(self, "spread", most=1.0)
        if not 1e-15 < self.spread**2 < self.acceptance * (1 - self.acceptance):
            raise ValueError(
                f"spread={self.spread} of {self.name!r} does not go with acceptance={self.acceptance}; it must be "
                f"above 3e-8 and below √(p (1 - p)) = {math.sqrt(self.acceptance * (1 - self.acceptance)):.3g}."
            )

    def seconds(self, length: float) -> AffineSeconds:
        """D: one token per request with `length` cached tokens."""
        return AffineSeconds(self.request_seconds + length * self.cached_token_seconds, self.fixed_seconds)

    def draw(self, chance: random.Random) -> float:
        """p of one request: a Beta distribution of this mean and spread."""
        concentration = self.acceptance * (1 - self.acceptance) / self.spread**2 - 1
        return chance.betavariate(self.acceptance * concentration, (1 - self.acceptance) * concentration)


@dataclass(frozen=True)
class Lengths:
    """Response lengths: log-normal, cut at the maximum."""

    median: float  # tokens
    sigma: float  # of the logarithm
    maximum: int  # tokens

    def __post_init__(self) -> None:
        for name, most in (("median", 1e9), ("sigma", 10.0), ("maximum", 262_144)):
            require_field(self, name, above=0, most=most)

    def draw(self, chance: random.Random) -> int:
        """Tokens of one response, at least 1."""
        return max(1, min(self.maximum, round(chance.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True)
class Cluster:
    """A training step's rollout and the workers that do it. Raises ValueError if a number is out of range."""

    name: str
    requests: int  # of a step, group members counted
    gpus: int
    worker_gpus: int  # of one copy of the target
    prompt_tokens: int
    lengths: Lengths
    target: TargetModel
    drafters: tuple[DrafterModel, ...]
    max_helped: int  # b_max of SA Algorithm 3: requests that a freed worker verifies at a time
    exchange_seconds: float  # a message between a drafter's and a verifier's worker, one way
    transfer_seconds: float  # to hand a request and its K/V to another worker
    prepare_seconds: float  # of a step, on all GPUs: rewards
    learn_seconds: float  # of a step, on all GPUs

    def __post_init__(self) -> None:
        for name, most in (("requests", 200_000), ("gpus", 8192), ("worker_gpus", 8192), ("max_helped", 200_000)):
            require_field(self, name, above=0, most=most)
        require_field(self, "prompt_tokens", most=100_000_000)
        for name in ("exchange_seconds", "transfer_seconds"):
            require_field(self, name, most=100.0)
        for name in ("prepare_seconds", "learn_seconds"):
            require_field(self, name, most=_MOST_SECONDS)
        if self.worker_gpus > self.gpus:
            raise ValueError(f"worker_gpus={self.worker_gpus} exceeds gpus={self.gpus}; no worker fits.")
        workers = self.gpus // self.worker_gpus
        if workers > _MOST_WORKERS or workers * self.lengths.maximum > _MOST_WORK:
            raise ValueError(
                f"{workers} workers (gpus={self.gpus}, worker_gpus={self.worker_gpus}) with responses of up to "
                f"maximum={self.lengths.maximum} tokens would take minutes to simulate; {_MOST_WORKERS:,} workers and "
                f"a product of {_MOST_WORK:,} are served. Lower gpus or maximum."
            )
        if len(self.drafters) > 16:
            raise ValueError(f"drafters has {len(self.drafters)} entries; it must have at most 16.")
        names = [drafter.name for drafter in self.drafters]
        if not names or len(set(names)) < len(names) or "none" in names:
            raise ValueError(
                f"drafters has the names {names}; it must have at least one, all different, and none may be 'none'."
            )
