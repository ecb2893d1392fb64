"""How long a forward takes: the roofline of ER §2.2 and §3.2, and a form of it that fits measured sweeps better.

Pure Python: it is evaluated in every decoding round.
"""

import math
from dataclasses import dataclass, fields
from typing import Any


SMALLEST_TILE = 16


@dataclass(frozen=True)
class ModelConstants:
    """What a forward of one target and of its drafter moves and computes, from the model's shape alone (ER App. E.3).

    Args:
        name: shown in tables and plots; nothing depends on it.
        weight_bytes: W_T, bytes of the target's weights; tied embeddings count once.
        draft_weight_bytes: W_D, bytes of the drafter's weights; 0 for a drafter without any.
        dense_flops: C_dense, FLOP per token outside attention, the lm_head included; of a mixture of experts, the
            active ones.
        attention_flops: C_attn, FLOP per token and cached token.
        kv_bytes: κ_theoretical, bytes per cached token over all layers.
        expert_bytes, draft_expert_bytes: the part of W_T and of W_D that sits in routed experts.
        experts, experts_per_token: routed experts of a layer and how many a token uses; 0 without experts.
    """

    name: str
    weight_bytes: float
    draft_weight_bytes: float
    dense_flops: float
    attention_flops: float
    kv_bytes: float
    expert_bytes: float = 0.0
    draft_expert_bytes: float = 0.0
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "dense_flops"):
            require_number(self, name, above=0.0)
        for name in ("draft_weight_bytes", "attention_flops", "kv_bytes"):
            require_number(self, name)
        for name in ("expert_bytes", "draft_expert_bytes", "experts", "experts_per_token"):
            require_number(self, name)
        for part, whole in (("expert_bytes", "weight_bytes"), ("draft_expert_bytes", "draft_weight_bytes")):
            if vars(self)[part] > vars(self)[whole]:
                raise ValueError(
                    f"{part}={vars(self)[part]} exceeds {whole}={vars(self)[whole]}, of which it is a part."
                )
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} exceeds experts={self.experts}.")

    def target_weight_traffic(self, tokens: int) -> float:
        """Bytes of the target's weights that a forward over `tokens` tokens reads."""
        return self.weight_bytes - self.expert_bytes * self._untouched(tokens)

    def draft_weight_traffic(self, tokens: int) -> float:
        """Bytes of the drafter's weights that a forward over `tokens` tokens reads."""
        return self.draft_weight_bytes - self.draft_expert_bytes * self._untouched(tokens)

    def _untouched(self, tokens: int) -> float:
        """The share of the routed experts that none of `tokens` tokens uses, routing taken as uniform."""
        if not self.experts:
            return 0.0
        return (1.0 - self.experts_per_token / self.experts) ** tokens


@dataclass(frozen=True)
class Coefficients:
    """What the calibration measures and fits. With the defaults of the second group the formulas are ER §3.2's own.

    > ER §3.2 and App. E.3

    Args:
        F_eff: effective compute throughput, FLOP/s, from GEMMs.
        BW_eff: effective memory bandwidth, B/s.
        rho_kappa: effective over theoretical K/V traffic (κ_eff = ρ_κ κ).
        eta_D: overhead of the quantized weight traffic over its bytes.
        c_T, c_D, c_V: overhead of target, draft and verify forwards, seconds per row of the batch.

    > Beyond the paper

    Args:
        overlap_loss: 0: memory traffic and arithmetic overlap fully, the longer one counts (ER Eq. 2); 1: not at all,
            they add up; between, their (1/overlap_loss)-norm.
        tile, draft_tile: rows that a GEMM kernel of the target and of the drafter handles at once; see `padded_rows`.
        phi_D: seconds of the drafter's arithmetic over the target's for as many rows (dequantization, other kernels).
        attention_cost: seconds of a FLOP of attention over one of a GEMM.
        kv_exponent: K/V time grows with B to this power: more rows keep more of the memory channels busy, and
            siblings share cached prompts. 1 in the paper.
        sigma_V: seconds per cached token of a row that verification walks serially; kernels for several query tokens
            do not split the cache among processors, those for one do.
        t_T, t_D, t_V: overhead of one target, draft and verify forward, seconds (launches, Python).
    """

    F_eff: float
    BW_eff: float
    rho_kappa: float
    eta_D: float
    c_T: float
    c_D: float
    c_V: float
    overlap_loss: float = 0.0
    tile: int = 1
    draft_tile: int = 1
    phi_D: float = 1.0
    attention_cost: float = 1.0
    kv_exponent: float = 1.0
    sigma_V: float = 0.0
    t_T: float = 0.0
    t_D: float = 0.0
    t_V: float = 0.0

    def __post_init__(self) -> None:
        for name in ("F_eff", "BW_eff"):
            require_number(self, name, above=0.0)
        for field in fields(self):
            require_number(self, field.name)
        for name in ("overlap_loss", "kv_exponent"):
            if vars(self)[name] > 1:
                raise ValueError(f"{name}={vars(self)[name]} is out of range; it must be 0 to 1.")
        for name in ("tile", "draft_tile"):
            tile = vars(self)[name]
            if tile < 1 or tile & (tile - 1):
                raise ValueError(f"{name}={tile} is out of range; it must be a power of two.")


@dataclass(frozen=True)
class Roofline:
    """Predicted seconds of a decoding round. `batch` is rows, `length` the mean cached tokens per row."""

    constants: ModelConstants
    coefficients: Coefficients

    def target_seconds(self, batch: int, length: float) -> float:
        """T̂_p: one autoregressive forward."""
        c = self.coefficients
        weights = self.constants.target_weight_traffic(batch)
        return self._forward(weights, batch, length, 1, c.tile, 1.0) + c.c_T * batch + c.t_T

    def draft_seconds(self, batch: int, length: float) -> float:
        """T̂_q: one forward of the drafter."""
        c = self.coefficients
        weights = c.eta_D * self.constants.draft_weight_traffic(batch)
        return self._forward(weights, batch, length, 1, c.draft_tile, c.phi_D) + c.c_D * batch + c.t_D

    def verify_seconds(self, batch: int, length: float, draft_length: int) -> float:
        """T̂_V: one target forward over `draft_length` + 1 tokens per row."""
        c = self.coefficients
        positions = draft_length + 1
        weights = self.constants.target_weight_traffic(batch * positions)
        seconds = self._forward(weights, batch, length, positions, c.tile, 1.0)
        return seconds + c.sigma_V * length + c.c_V * batch + c.t_V

    def cycle_seconds(self, batch: int, length: float, draft_length: int) -> float:
        """γ T̂_q + T̂_V: one round of speculation."""
        drafting = draft_length * self.draft_seconds(batch, length)
        return drafting + self.verify_seconds(batch, length, draft_length)

    def speedup(self, batch: int, length: float, block_efficiency: float, draft_length: int) -> float:
        """ER Eq. 1: τ T̂_p / (γ T̂_q + T̂_V), `block_efficiency` τ with the bonus token included."""
        cycle = self.cycle_seconds(batch, length, draft_length)
        return block_efficiency * self.target_seconds(batch, length) / cycle

    def _forward(self, weights: float, batch: int, length: float, positions: int, tile: int, cost: float) -> float:
        """Seconds of a forward over `positions` tokens per row that reads `weights` bytes, without overheads."""
        k, c = self.constants, self.coefficients
        tokens = batch * positions
        memory = (weights + c.rho_kappa * k.kv_bytes * batch**c.kv_exponent * length) / c.BW_eff
        dense = cost * padded_rows(tokens, tile) * k.dense_flops
        compute = (dense + c.attention_cost * tokens * length * k.attention_flops) / c.F_eff
        return smooth_maximum(memory, compute, c.overlap_loss)


def padded_rows(rows: int, tile: int) -> int:
    """`rows` rounded up to whole tiles: to a multiple of `tile`, or below it to a power of two of at least 16, the
    least that a tensor core takes. A `tile` of 1 rounds nothing."""
    if rows < tile:
        tile = min(tile, max(SMALLEST_TILE, 1 << (rows - 1).bit_length()))
    return -(-rows // tile) * tile


def smooth_maximum(a: float, b: float, loss: float) -> float:
    """The (1/`loss`)-norm of two non-negative numbers: their maximum at `loss` 0, their sum at 1."""
    high, low = max(a, b), min(a, b)
    if loss == 0.0 or low == 0.0:
        return high
    return high * (1.0 + (low / high) ** (1.0 / loss)) ** loss


def require_number(owner: Any, name: str, above: float | None = None) -> None:
    """Raises ValueError unless `owner`'s field `name` is a finite number of at least 0 (or greater than `above`), and
    an integer where the field is declared as one."""
    value = vars(owner)[name]
    kinds = (int,) if type(owner).__dataclass_fields__[name].type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = "an integer" if kinds == (int,) else "a number"
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}; it must be {wanted}.")
    if not math.isfinite(value) or value < 0 or (above is not None and value <= above):
        bound = "at least 0" if above is None else f"greater than {above:g}"
        raise ValueError(f"{name}={value} is out of range; it must be finite and {bound}.")
