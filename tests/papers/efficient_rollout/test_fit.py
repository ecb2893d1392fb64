"""The fit: the paper's own numbers from its own data, recovery of known coefficients, and bad input."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.published import read_fit, read_sweep
from spec_trl.generation.planner.model_constants import ModelConstants
from spec_trl.papers.efficient_rollout.fit import (
    BANDWIDTH_SHARE,
    GemmMeasurement,
    Rooflines,
    effective_flops,
    evaluate,
    fit,
)
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.sweep import Sample


PEAK_BANDWIDTH = 2.039e12
BANDWIDTH = (BANDWIDTH_SHARE[0] * PEAK_BANDWIDTH, BANDWIDTH_SHARE[1] * PEAK_BANDWIDTH)
F_EFF = 233.514e12
CONSTANTS = ModelConstants("made up", 15e9, 5.4e9, 14e9, 4e5, 5.7e4)
TRUTH = Coefficients(F_EFF, 1.6e12, 0.5, 1.4, 4e-5, 7e-5, 1.5e-4)
BATCHES, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (256.0, 1024.0, 4096.0)


@pytest.fixture(scope="module", params=["qwen257b", "llama318binstruct"])
def published(shared: Callable[[str], Path], request: pytest.FixtureRequest) -> tuple[str, list[Sample], Roofline]:
    """A published sweep with the roofline that its authors fitted to it."""
    folder = shared("data/efficientrollout")
    with pytest.warns(UserWarning, match="grid points lack"):
        samples = read_sweep(folder / f"sweep_a100_tp1_{request.param}.csv")
    return request.param, samples, read_fit(folder / f"published_fit_{request.param}.json").roofline


def measured(roofline: Roofline, noise: float = 0.0, batches: tuple[int, ...] = BATCHES) -> list[Sample]:
    """A sweep of what `roofline` predicts."""
    generator, samples = np.random.default_rng(0), list[Sample]()
    for batch, length in product(batches, LENGTHS):
        for mode, gamma in [("target", 0), *product(("draft", "verify"), (3, 7, 11))]:
            samples.append(Sample(batch, length, gamma, mode, roofline.seconds(mode, batch, length, gamma)))
    return [replace(s, seconds=s.seconds * math.exp(noise * generator.standard_normal())) for s in samples]


def accuracies(roofline: Roofline, samples: list[Sample]) -> list[float]:
    return [100 * sign.accuracy for sign in evaluate(roofline, samples).signs]


def test_the_paper_form_finds_the_published_coefficients(published: tuple[str, list[Sample], Roofline]) -> None:
    model, samples, theirs = published
    roofline, found = fit(samples, theirs.constants, F_EFF, BANDWIDTH, form="paper")
    for name in ("BW_eff", "rho_kappa", "eta_D", "c_T", "c_D", "c_V"):
        assert vars(roofline.coefficients)[name] == pytest.approx(vars(theirs.coefficients)[name], rel=2e-3), name
    assert found.target_mape <= {"qwen257b": 0.020, "llama318binstruct": 0.034}[model]
    for mine, known in zip(accuracies(roofline, samples), accuracies(theirs, samples), strict=True):
        assert mine >= known


@pytest.mark.parametrize(("form", "limit"), [("paper", 1e-3), ("improved", 0.01)])
def test_known_coefficients_are_recovered(form: Any, limit: float) -> None:
    samples = measured(Roofline(CONSTANTS, TRUTH), batches=BATCHES if form == "paper" else (1, 8, 64))
    roofline, found = fit(samples, CONSTANTS, F_EFF, BANDWIDTH, form=form)
    assert max(found.target_mape, found.draft_mape, found.verify_mape, found.cycle_mape) < limit
    assert min(sign.accuracy for sign in found.signs) > 0.98
    if form == "paper":
        for name, value in vars(TRUTH).items():
            assert vars(roofline.coefficients)[name] == pytest.approx(value, rel=0.01), name
        assert roofline == fit(samples, CONSTANTS, F_EFF, BANDWIDTH, form=form)[0]  # reproducible


@pytest.mark.slow
def test_the_improved_fit_is_reproducible_and_bears_noise() -> None:
    samples = measured(Roofline(CONSTANTS, TRUTH), noise=0.03)
    first, found = fit(samples, CONSTANTS, F_EFF, BANDWIDTH)
    assert first == fit(samples, CONSTANTS, F_EFF, BANDWIDTH)[0]
    assert found.cycle_mape < 0.03


def test_a_machine_of_another_kind_is_fitted_too() -> None:
    """A forward of constant cost, rows that soon saturate the processor, a drafter slower than its bytes say, experts,
    and tiles: predictions hold at batches that were not measured. So Roofline and the fit have the same formulas."""
    constants = ModelConstants("small", 1e9, 3e8, 1e9, 5e4, 1.2e4, 5e8, 1e8, 8, 2)
    truth = Coefficients(
        2e12, 2e10, 2.0, 5.0, 2e-4, 5e-4, 3e-4, overlap_loss=0.7, tile=16, draft_tile=16, phi_D=1.5,
        attention_cost=8.0, sigma_V=1e-6, t_T=5e-3, t_D=8e-3,
    )  # fmt: skip
    fitted, _ = fit(measured(Roofline(constants, truth), batches=(1, 4, 16, 64)), constants, 2e12, (8e9, 4e10))
    found = evaluate(fitted, measured(Roofline(constants, truth), batches=(2, 8, 32)))
    assert max(found.target_mape, found.draft_mape, found.verify_mape) < 0.05
    assert min(sign.accuracy for sign in found.signs) > 0.9


def test_what_arrays_do_otherwise_than_numbers_gives_the_same() -> None:
    rows = [1, 7, 15, 16, 17, 64, 100, 128, 129, 300]
    for tile in (1, 16, 128):
        expected = [Roofline.padded_rows(count, tile) for count in rows]
        assert Rooflines.padded_rows(np.array(rows), tile) == pytest.approx(expected)
    for loss in (0.0, 0.4, 1.0):
        expected = [Roofline.smooth_maximum(3.0, count, loss) for count in rows]
        assert Rooflines.smooth_maximum(3.0, np.array(rows), loss) == pytest.approx(expected, rel=1e-3)


def test_evaluate_counts_signs() -> None:
    roofline = Roofline(CONSTANTS, TRUTH)
    samples = measured(roofline)
    right = evaluate(roofline, samples, thresholds=(1.0, 1.3))
    assert right.target_mape == right.cycle_mape == 0.0 and right.points == 63
    assert [(sign.threshold, sign.accuracy) for sign in right.signs] == [(1.0, 1.0), (1.3, 1.0)]
    # A drafter that is predicted to cost nothing makes every point look good.
    wrong = evaluate(Roofline(replace(CONSTANTS, weight_bytes=1e15), replace(TRUTH, eta_D=0.0, c_D=0.0)), samples)
    share = sum(roofline.speedup(b, s, g, g) >= 1.0 for b, s, g in product(BATCHES, LENGTHS, (3, 7, 11))) / 63
    assert 0 < share < 1 and wrong.target_mape > 1
    assert wrong.signs[0].accuracy == pytest.approx(share)
    assert wrong.signs[0].majority == pytest.approx(max(share, 1 - share))


def test_effective_flops_of_the_published_benchmark(shared: Callable[[str], Path]) -> None:
    content = json.loads(shared("data/efficientrollout/F_eff_bench_a100.json").read_text())
    found = {}
    for model, benchmark in content["models"].items():
        measurements = []
        for name, teraflops in benchmark["per_shape_B"].items():
            layer, rows = name.rsplit("_B", 1)
            flops = 2 * int(rows) * benchmark["flops_weights"][layer]
            measurements.append(GemmMeasurement(layer, int(rows), flops // 2 // int(rows), flops / (teraflops * 1e12)))
        assert len(measurements) == 36
        found[model] = effective_flops(measurements) / 1e12
        assert found[model] == pytest.approx(benchmark["F_eff_tflops_weighted"], abs=1e-3)
    assert found["Llama-3.1-8B-Instruct_tp1"] == pytest.approx(content["F_eff_hardware_tflops"], abs=1e-3)
    assert round(content["F_eff_hardware_tflops"], 1) == 233.5


@pytest.mark.slow
def test_the_improved_form_on_the_published_sweeps(published: tuple[str, list[Sample], Roofline]) -> None:
    model, samples, theirs = published
    roofline, found = fit(samples, theirs.constants, F_EFF, BANDWIDTH)
    known = evaluate(theirs, samples)
    assert found.target_mape <= {"qwen257b": 0.020, "llama318binstruct": 0.034}[model]
    assert found.verify_mape < 0.6 * known.verify_mape
    assert found.cycle_mape < 0.9 * known.cycle_mape
    assert min(accuracies(roofline, samples)) >= 96.5
    seen = [s for s in samples if s.draft_length in (0, 3, 11)]
    unseen = [s for s in samples if s.draft_length in (0, 7, 15)]
    improved, paper = (
        evaluate(fit(seen, theirs.constants, F_EFF, BANDWIDTH, form=form)[0], unseen) for form in ("improved", "paper")
    )
    assert improved.verify_mape < 0.7 * paper.verify_mape
    assert improved.cycle_mape < paper.cycle_mape
