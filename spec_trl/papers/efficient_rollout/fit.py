"""Fits a roofline to a sweep, and judges the fit (ER App. E.3, E.4).

ER's three stages: F_eff from GEMMs; BW_eff, ρ_κ and c_T from the target's times; the rest from those of draft and
verification. The improved form shares more parameters between target and verification, and so joins its last two.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from ...generation.planner.model_constants import ModelConstants
from .roofline import SMALLEST_TILE, Coefficients, Mode, Roofline
from .sweep import MODES, Sample, check_samples, points


Form = Literal["paper", "improved"]
Array = NDArray[np.float64]
Values = Mapping[str, Any]  # of coefficients: [P, 1] each, or a number where it is fixed

SATURATED_ROWS = 256
BANDWIDTH_SHARE = (0.4, 1.05)  # bounds of BW_eff as shares of the peak bandwidth (ER's calibration)
FLOPS_SHARE = (0.7, 1.5)  # GEMMs of a model against the benchmarked ones
THRESHOLDS = (1.0, 1.05)  # speedups for judging the toggle's sign: break-even, and ER's margin (App. E.4)
GENERATIONS = 100
# No rounding; matrix units that take 16 rows; tensor-core kernels. Kernels for packed weights serve small batches:
# their tiles are the smallest there are.
TILES = ({"tile": 1, "draft_tile": 1}, {"tile": 16, "draft_tile": 16}, {"tile": 128, "draft_tile": 16})


@dataclass(frozen=True)
class GemmMeasurement:
    layer: str  # name of the shape
    rows: int  # M, of the activation
    weights: int  # elements of the weight matrix
    seconds: float  # of one product


def effective_flops(measurements: Iterable[GemmMeasurement]) -> float:
    """F_eff in FLOP/s, from GEMMs of a model's layers at several numbers of rows (ER App. E.3).

    The throughputs at one number of rows are averaged with the layers' FLOPs as weights; of these averages at 256 rows
    and more the median counts. (That is how ER's published 233.5 TFLOP/s follows from its published benchmark.)
    """
    saturated: dict[int, list[GemmMeasurement]] = {}
    for m in measurements:
        if not (math.isfinite(m.seconds) and m.seconds > 0):
            raise ValueError(f"seconds={m.seconds} of {m.layer} at {m.rows} rows must be finite and positive.")
        if m.rows >= SATURATED_ROWS:
            saturated.setdefault(m.rows, []).append(m)
    if not saturated:
        raise ValueError(f"measurements hold no GEMM of {SATURATED_ROWS} rows or more; time some.")
    return statistics.median(
        sum(m.weights * 2.0 * rows * m.weights / m.seconds for m in found) / sum(m.weights for m in found)
        for rows, found in saturated.items()
    )


@dataclass(frozen=True)
class SignAccuracy:
    """How often prediction and measurement agree on whether speculation pays."""

    threshold: float  # of the speedup, on both sides
    accuracy: float  # share of the grid with agreement
    majority: float  # agreement of always guessing the more frequent answer


@dataclass(frozen=True)
class Diagnostics:
    """A roofline against measured times: mean absolute errors of T_T, T_D, T_V and γ T_D + T_V, as shares of the
    measured times."""

    target_mape: float
    draft_mape: float
    verify_mape: float
    cycle_mape: float
    signs: tuple[SignAccuracy, ...]  # agreement of the toggle at τ = γ, as in ER App. E.4, over every (B, S, γ)
    points: int  # number of (B, S, γ)

    @property
    def guessing(self) -> SignAccuracy | None:
        """Returns the signs at a threshold where always guessing the more frequent answer does as well, with errors
        left; None: no such threshold."""
        return next((sign for sign in self.signs if sign.accuracy < 1 and sign.accuracy <= sign.majority), None)


def evaluate(roofline: Roofline, samples: Sequence[Sample], thresholds: Sequence[float] = THRESHOLDS) -> Diagnostics:
    """Compares `roofline` with measured `samples`; signs are compared at all `thresholds`."""
    grid = points(samples)
    if not grid:
        raise ValueError("samples hold no (batch, length, draft_length) with target, draft and verify times.")
    errors: dict[str, list[float]] = {"target": [], "draft": [], "verify": [], "cycle": []}
    for s in samples:
        predicted = roofline.seconds(s.mode, s.batch, s.length, s.draft_length)
        errors[s.mode].append(abs(predicted / s.seconds - 1.0))
    errors["cycle"] = [abs(roofline.cycle_seconds(*p[:3]) / p.cycle - 1.0) for p in grid]
    measured = np.array([p.draft_length * p.target / p.cycle for p in grid])  # [N]
    expected = np.array([roofline.speedup(p.batch, p.length, p.draft_length, p.draft_length) for p in grid])  # [N]
    signs = []
    for threshold in thresholds:
        beneficial = measured >= threshold  # [N]
        agree, share = beneficial == (expected >= threshold), float(beneficial.mean())
        signs.append(SignAccuracy(threshold, float(agree.mean()), max(share, 1.0 - share)))
    mape = {f"{mode}_mape": float(np.mean(found)) for mode, found in errors.items()}
    return Diagnostics(**mape, signs=tuple(signs), points=len(grid))


def fit(
    samples: Sequence[Sample],
    constants: ModelConstants,
    flops_per_second: float,
    bandwidth_bounds: tuple[float, float],
    form: Form = "improved",
) -> tuple[Roofline, Diagnostics]:
    """Fits a roofline to a sweep, and evaluates it on the same samples.

    Args:
        samples: of target, draft and verify forwards.
        constants: of the swept model.
        flops_per_second: F_eff, FLOP/s; see `effective_flops`.
        bandwidth_bounds: lowest and highest BW_eff to consider, B/s; ER takes 0.4 and 1.05 of the peak.
        form: `"paper"` is ER §3.2 as printed, fitted as in App. E.3.

    Raises:
        ValueError: rows are missing from `samples`, or a number is out of range.
    """
    check_samples(samples, "samples")
    low, high = bandwidth_bounds
    if not 0 < low < high < math.inf:
        raise ValueError(f"bandwidth_bounds={bandwidth_bounds} must be two positive numbers in ascending order.")
    if not 0 < flops_per_second < math.inf:
        raise ValueError(f"flops_per_second={flops_per_second} must be finite and positive.")
    start = Coefficients(flops_per_second, math.sqrt(low * high), 1.0, 1.0, 0.0, 0.0, 0.0)
    if form not in get_args(Form):
        raise ValueError(f"form={form!r} is unknown; choose 'paper' or 'improved'.")
    find = _fit_paper if form == "paper" else _fit_improved
    roofline = Roofline(constants, find(_Sweep(samples, constants), start, bandwidth_bounds))
    return roofline, evaluate(roofline, samples)


# ---- the search -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parameter:
    """A coefficient to search for between `low` and `high`; small values of a `square` one are resolved more finely,
    and a `log` one by ratio."""

    name: str
    low: float
    high: float
    scale: Literal["linear", "square", "log"] = "linear"

    def value(self, unit: Array) -> Array:
        if self.scale == "log":
            return self.low * (self.high / self.low) ** unit
        return self.low + (self.high - self.low) * (unit**2 if self.scale == "square" else unit)

    def unit(self, value: float) -> float:
        if self.scale == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        share = (value - self.low) / (self.high - self.low)
        return math.sqrt(share) if self.scale == "square" else share


class _Search:
    def __init__(self, parameters: Sequence[_Parameter], start: Coefficients, loss: Callable[[Values], Array]) -> None:
        self._parameters, self._start, self._loss = parameters, start, loss
        self._bounds = [(0.0, 1.0)] * len(parameters)

    def descend(self, start: Coefficients) -> tuple[float, Coefficients]:
        """By L-BFGS-B from near `start`: the loss and the coefficients."""
        # A little inside the bounds: at 0 a squared scale has no slope.
        return self._descend(np.clip(self._units(start), 0.1, 0.9))

    def best(self, start: Coefficients) -> tuple[float, Coefficients]:
        """The better of `descend` and of L-BFGS-B after differential evolution with a fixed seed, from a population
        with `start`."""
        result = optimize.differential_evolution(
            lambda units: self._losses(units if units.ndim == 2 else units[:, None]), self._bounds,
            popsize=10, maxiter=GENERATIONS, tol=1e-6, rng=0, polish=False, vectorized=True, updating="deferred",
            x0=self._units(start),
        )  # fmt: skip
        return min(self._descend(result.x), self.descend(start), key=lambda found: found[0])

    def _units(self, start: Coefficients) -> Array:
        return np.clip([p.unit(vars(start)[p.name]) for p in self._parameters], 0.0, 1.0)

    def _descend(self, units: Array) -> tuple[float, Coefficients]:
        result = optimize.minimize(self._with_gradient, units, jac=True, method="L-BFGS-B", bounds=self._bounds)
        values: dict[str, Any] = {p.name: float(p.value(u)) for p, u in zip(self._parameters, result.x, strict=True)}
        return float(result.fun), replace(self._start, **values)

    def _losses(self, units: Array) -> Array:
        pairs = zip(self._parameters, units, strict=True)
        return self._loss(vars(self._start) | {p.name: p.value(unit)[:, None] for p, unit in pairs})

    def _with_gradient(self, units: Array) -> tuple[float, Array]:
        steps = np.where(units > 0.5, -1e-6, 1e-6)  # [n], inwards
        # One-sided differences, all in one call.
        losses = self._losses(np.column_stack([units, units[:, None] + np.diag(steps)]))  # [n + 1]
        return float(losses[0]), (losses[1:] - losses[0]) / steps


class _Points:
    """Points of timed forwards: `batch`, `length`, `draft_length` and `seconds`, each `[N]`."""

    def __init__(self, entries: Iterable[tuple[int, float, int, float]]) -> None:
        columns = np.array(list(entries), dtype=np.float64).reshape(-1, 4).T  # [4, N]
        self.batch, self.length, self.draft_length, self.seconds = columns


class Rooflines(Roofline):
    """The roofline's formulas for many coefficients (`[P, 1]` each, or a number) at many points (`[N]`): `[P, N]`."""

    @staticmethod
    def padded_rows(rows: Any, tile: Any) -> Any:
        below = np.maximum(SMALLEST_TILE, 2.0 ** np.ceil(np.log2(rows)))
        tiles = np.where(rows < tile, np.minimum(tile, below), tile)
        return np.ceil(rows / tiles) * tiles

    @staticmethod
    def smooth_maximum(a: Any, b: Any, loss: Any) -> Any:
        high, low = np.maximum(a, b), np.minimum(a, b)
        loss = np.maximum(loss, 1e-3)  # 0 is the maximum; so is this but for the last digits
        return high * (1.0 + (low / high) ** (1.0 / loss)) ** loss


TARGET_WEIGHT = 2.0  # of T_T, the divisor of every decision
SIGN_WEIGHT = 0.1
SIGN_WIDTH = 0.005  # of the step that counts a sign, as a share of the speedup
OUTLIER = 0.03  # relative errors beyond this count linearly: sweeps hold times of rows that ended early


class _Sweep:
    """A sweep as arrays, and the distance of coefficients (`[P, 1]` each) from it."""

    def __init__(self, samples: Sequence[Sample], constants: ModelConstants) -> None:
        self._constants, found = constants, points(samples)
        self.of_mode = {
            mode: _Points((s.batch, s.length, s.draft_length, s.seconds) for s in samples if s.mode == mode)
            for mode in MODES
        }
        self._rounds = _Points((*p[:3], p.cycle) for p in found)
        self._plain = np.array([p.target for p in found])  # [N]

    def error(self, values: Values, mode: Mode) -> Array:
        """Log of predicted over measured seconds: `[P, N]`."""
        return np.asarray(np.log(self._seconds(values, mode, self.of_mode[mode]) / self.of_mode[mode].seconds))

    def loss(self, values: Values, mean: Callable[[Array], Array], signs: float = 0.0) -> Array:
        """Half on the draft and verify times, half on the round and on the deciding ratio: `[P]`."""
        gamma = self._rounds.draft_length
        cycle = gamma * self._seconds(values, "draft", self._rounds)  # [P, N]
        cycle = cycle + self._seconds(values, "verify", self._rounds)
        ratio = self._seconds(values, "target", self._rounds) / cycle  # T_T / T_cycle
        measured = self._plain / self._rounds.seconds  # [N]
        parts = mean(self.error(values, "draft")) + mean(self.error(values, "verify"))
        total = 0.5 * (parts + mean(np.log(cycle / self._rounds.seconds)) + mean(ratio - measured))
        for threshold in THRESHOLDS if signs else ():
            beneficial = np.sign(np.log(gamma * measured / threshold))
            margin = beneficial * np.log(gamma * ratio / threshold) / SIGN_WIDTH
            total = total + signs * np.mean(1.0 / (1.0 + np.exp(np.clip(margin, -50, 50))), axis=-1)
        return np.asarray(total)

    def _seconds(self, values: Values, mode: Mode, at: _Points) -> Array:
        rooflines: Any = Rooflines(self._constants, SimpleNamespace(**values))  # type: ignore[arg-type]
        return np.asarray(rooflines.seconds(mode, at.batch, at.length, at.draft_length))


def _fit_paper(sweep: _Sweep, start: Coefficients, bandwidth: tuple[float, float]) -> Coefficients:
    """ER App. E.3, stages two and three."""
    most = float(sweep.of_mode["target"].seconds.min())
    first = [
        _Parameter("BW_eff", *bandwidth, "log"),
        _Parameter("rho_kappa", 0.1, 2.5),
        _Parameter("c_T", 0.0, most, "square"),
    ]
    start = _Search(first, start, lambda values: _mean_square(sweep.error(values, "target"))).best(start)[1]
    second = [
        _Parameter("eta_D", 1.0, 4.0),
        _Parameter("c_D", 0.0, most, "square"),
        _Parameter("c_V", 0.0, most, "square"),
    ]
    return _Search(second, start, lambda values: sweep.loss(values, _mean_square)).best(start)[1]


def _fit_improved(sweep: _Sweep, start: Coefficients, bandwidth: tuple[float, float]) -> Coefficients:
    """All coefficients at once: target and verification share the cost of a forward over a number of rows."""
    most = float(sweep.of_mode["target"].seconds.min())
    longest = max(float(sweep.of_mode["verify"].length.max()), 1.0)
    parameters = [
        _Parameter("F_eff", FLOPS_SHARE[0] * start.F_eff, FLOPS_SHARE[1] * start.F_eff, "log"),
        _Parameter("BW_eff", *bandwidth, "log"),
        _Parameter("rho_kappa", 0.1, 10.0, "log"),
        _Parameter("eta_D", 1.0, 16.0, "log"),
        _Parameter("phi_D", 0.05, 20.0, "log"),
        _Parameter("attention_cost", 1.0, 100.0, "log"),
        _Parameter("kv_exponent", 0.3, 1.0),
        _Parameter("overlap_loss", 0.0, 1.0),
        _Parameter("sigma_V", 0.0, most / longest, "square"),
        *(_Parameter(f"c_{who}", 0.0, most, "square") for who in "TDV"),
        *(_Parameter(f"t_{who}", 0.0, most, "square") for who in "TDV"),
    ]

    def loss(values: Values, signs: float = 0.0) -> Array:
        target = TARGET_WEIGHT * _mean_robust(sweep.error(values, "target"))
        return np.asarray(target + sweep.loss(values, _mean_robust, signs))

    found = []
    for tiles in TILES:
        by_time = _Search(parameters, replace(start, **tiles), loss).descend(start)[1]
        # If many coefficients fit the times about equally well, the signs decide.
        found.append(_Search(parameters, by_time, lambda values: loss(values, SIGN_WEIGHT)).best(by_time))
    return min(found, key=lambda entry: entry[0])[1]


def _mean_square(error: Array) -> Array:
    return np.asarray(np.mean(error**2, axis=-1))


def _mean_robust(error: Array) -> Array:
    return np.asarray(np.mean(2 * OUTLIER**2 * (np.sqrt(1 + (error / OUTLIER) ** 2) - 1), axis=-1))
