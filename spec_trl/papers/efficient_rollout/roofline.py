"""Predicts the seconds of a forward by the roofline (ER §2.2, §3.2).

Pure Python, because every decoding round evaluates it.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

from ...generation.planner.model_constants import ModelConstants
from ...value_checks import require_field


Mode = Literal["target", "draft", "verify"]
SMALLEST_TILE = 16  # rows: the fewest of a tensor core


@dataclass(frozen=True)
class Coefficients:
    """Measured and fitted coefficients of a calibration. With the defaults of the second group the formulas are those
    of ER §3.2. Raises ValueError if a number is out of range."""

    # ER §3.2 and App. E.3
    F_eff: float  # compute throughput, FLOP/s, from GEMMs
    BW_eff: float  # memory bandwidth, B/s
    rho_kappa: float  # effective over theoretical K/V traffic (κ_eff = ρ_κ κ)
    eta_D: float  # time of the quantized weights' traffic over that of their bytes
    c_T: float  # overhead of a target forward, seconds per row of the batch
    c_D: float  # likewise of a draft forward
    c_V: float  # likewise of a verify forward

    # Beyond the paper
    # 0: memory traffic and arithmetic overlap fully, and the longer one counts (ER Eq. 2); 1: not at all, they add up.
    overlap_loss: float = 0.0
    tile: int = 1  # rows that a GEMM kernel of the target handles at once; see `padded_rows`
    draft_tile: int = 1  # likewise of the drafter
    phi_D: float = 1.0  # seconds of the drafter's arithmetic over the target's for as many rows (dequantization, ...)
    attention_cost: float = 1.0  # seconds of a FLOP of attention over one of a GEMM
    # K/V time grows with B to this power: more rows use more memory channels, and copies of a prompt share its K/V.
    kv_exponent: float = 1.0
    # Seconds per cached token of a row that verification walks serially: kernels for several query tokens do not split
    # the cache among processors, kernels for one do.
    sigma_V: float = 0.0
    t_T: float = 0.0  # overhead of a target forward, seconds (launches, Python)
    t_D: float = 0.0  # likewise of a draft forward
    t_V: float = 0.0  # likewise of a verify forward

    def __post_init__(self) -> None:
        for field in fields(self):
            above = 0.0 if field.name in ("F_eff", "BW_eff") else None
            most = 1.0 if field.name in ("overlap_loss", "kv_exponent") else math.inf
            require_field(self, field.name, above, most)
        for name in ("tile", "draft_tile"):
            if (tile := vars(self)[name]).bit_count() != 1:
                raise ValueError(f"{name}={tile} is out of range; it must be a power of two.")


@dataclass(frozen=True)
class Roofline:
    """Predicted seconds of a decoding round. `batch` is rows, `length` the mean cached tokens per row."""

    constants: ModelConstants
    coefficients: Coefficients

    def seconds(self, mode: Mode, batch: int, length: float, draft_length: int) -> float:
        """Seconds of a forward of this kind; γ = `draft_length` matters only to "verify"."""
        if mode == "verify":
            return self.verify_seconds(batch, length, draft_length)
        return self.target_seconds(batch, length) if mode == "target" else self.draft_seconds(batch, length)

    def target_seconds(self, batch: int, length: float) -> float:
        """T̂_p: one autoregressive forward."""
        c = self.coefficients
        weights = self.constants.target_weight_traffic(batch)
        return self._forward(weights, batch, length, 1, c.tile, 1.0) + (c.c_T * batch + c.t_T)

    def draft_seconds(self, batch: int, length: float) -> float:
        """T̂_q: one forward of the drafter."""
        c = self.coefficients
        weights = c.eta_D * self.constants.draft_weight_traffic(batch)
        return self._forward(weights, batch, length, 1, c.draft_tile, c.phi_D) + (c.c_D * batch + c.t_D)

    def verify_seconds(self, batch: int, length: float, draft_length: int) -> float:
        """T̂_V: one target forward over `draft_length` + 1 tokens per row."""
        c = self.coefficients
        positions = draft_length + 1
        weights = self.constants.target_weight_traffic(batch * positions)
        seconds = self._forward(weights, batch, length, positions, c.tile, 1.0)
        return seconds + (c.c_V * batch + c.t_V + c.sigma_V * length)

    def cycle_seconds(self, batch: int, length: float, draft_length: int) -> float:
        """γ T̂_q + T̂_V: one round of speculation."""
        return draft_length * self.draft_seconds(batch, length) + self.verify_seconds(batch, length, draft_length)

    def speedup(self, batch: int, length: float, block_efficiency: float, draft_length: int) -> float:
        """ER Eq. 1: τ T̂_p / (γ T̂_q + T̂_V), `block_efficiency` τ with the bonus token included."""
        return block_efficiency * self.target_seconds(batch, length) / self.cycle_seconds(batch, length, draft_length)

    def _forward(self, weights: float, batch: int, length: float, positions: int, tile: int, cost: float) -> float:
        """Seconds of a forward over `positions` tokens per row that reads `weights` bytes, without overheads."""
        k, c = self.constants, self.coefficients
        tokens = batch * positions
        memory = (weights + c.rho_kappa * k.kv_bytes * (batch**c.kv_exponent * length)) / c.BW_eff
        dense = cost * self.padded_rows(tokens, tile) * k.dense_flops
        compute = (dense + c.attention_cost * (tokens * length * k.attention_flops)) / c.F_eff
        return self.smooth_maximum(memory, compute, c.overlap_loss)

    @staticmethod
    def padded_rows(rows: int, tile: int) -> int:
        """`rows` rounded up to whole tiles: to a multiple of `tile`, or below it to a power of two, at least
        `SMALLEST_TILE`. A `tile` of 1 rounds nothing."""
        if rows < tile:
            tile = min(tile, max(SMALLEST_TILE, 1 << (rows - 1).bit_length()))
        return -(-rows // tile) * tile

    @staticmethod
    def smooth_maximum(a: float, b: float, loss: float) -> float:
        """The (1/`loss`)-norm of two non-negative numbers: their maximum at `loss` 0, their sum at 1."""
        high, low = max(a, b), min(a, b)
        if loss == 0.0 or low == 0.0:
            return high
        return high * (1.0 + (low / high) ** (1.0 / loss)) ** loss
