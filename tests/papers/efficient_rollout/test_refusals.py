"""What roofline, fit and profile refuse, with the argument and the remedy."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_trl.generation.planner.model_constants import ModelConstants
from spec_trl.papers.efficient_rollout.fit import GemmMeasurement, effective_flops, evaluate, fit
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.sweep import Sample
from tests.papers.efficient_rollout.test_profile import PROFILE


COEFFICIENTS = Coefficients(F_eff=2e14, BW_eff=1.5e12, rho_kappa=0.5, eta_D=1.3, c_T=4e-5, c_D=7e-5, c_V=1.5e-4)
CONSTANTS = ModelConstants("m", 15e9, 5e9, 14e9, 4e5, 5e4, 12e9, 3e9, experts=8, experts_per_token=2)
SAMPLES = [
    Sample(1, 128.0, 0, "target", 0.01), Sample(1, 128.0, 3, "draft", 0.01), Sample(1, 128.0, 3, "verify", 0.02)
]  # fmt: skip


def fitted(samples: list[Sample] = SAMPLES, flops: float = 1e14, bandwidth: Any = (1e12, 2e12), **form: Any) -> object:
    return fit(samples, CONSTANTS, flops, bandwidth, **form)


Act = Callable[[], object]
REFUSED: list[tuple[Act, str]] = [
    # roofline
    *(
        (lambda value=value: replace(COEFFICIENTS, eta_D=value), "eta_D=")
        for value in (-1.0, math.nan, "1", None, True)
    ),
    (lambda: replace(COEFFICIENTS, BW_eff=0), "BW_eff=0 is out of range; it must be finite and greater than 0"),
    (lambda: replace(COEFFICIENTS, overlap_loss=1.5), "overlap_loss=1.5"),
    (lambda: replace(COEFFICIENTS, kv_exponent=2.0), "kv_exponent=2.0"),
    (lambda: replace(COEFFICIENTS, tile=0), "tile=0"),
    (lambda: replace(COEFFICIENTS, tile=24), "tile=24 is out of range; it must be a power of two"),
    (lambda: replace(COEFFICIENTS, draft_tile=16.0), "draft_tile=16.0 is a float; it must be an integer"),
    (lambda: replace(CONSTANTS, kv_bytes=math.inf), "kv_bytes=inf"),
    (lambda: replace(CONSTANTS, weight_bytes=0.0), "weight_bytes=0.0"),
    (lambda: replace(CONSTANTS, expert_bytes=16e9), "expert_bytes=16000000000.0 exceeds weight_bytes"),
    (lambda: replace(CONSTANTS, experts_per_token=9), "experts_per_token=9 exceeds experts=8"),
    # sweep, fit
    (lambda: replace(SAMPLES[2], seconds=0), "seconds=0 is out of range"),
    (lambda: replace(SAMPLES[2], mode="prefill"), "mode='prefill' is unknown"),
    (lambda: replace(SAMPLES[2], draft_length=0), "draft_length=0 of a verify sample"),
    (lambda: effective_flops([GemmMeasurement("qkv", 128, 1000, 1.0)]), "no GEMM of 256 rows or more"),
    (lambda: effective_flops([GemmMeasurement("qkv", 256, 1000, 0.0)]), "seconds=0.0 of qkv at 256 rows"),
    (lambda: evaluate(Roofline(CONSTANTS, COEFFICIENTS), SAMPLES[:1]), "samples hold no"),
    (lambda: fitted(SAMPLES[:2]), "has no verify row"),
    (lambda: fitted([*SAMPLES[1:], replace(SAMPLES[0], batch=2)]), "no target row for batch=1, length=128"),
    (lambda: fitted(bandwidth=(2e12, 1e12)), "bandwidth_bounds="),
    (lambda: fitted(bandwidth=(1e12, math.inf)), "bandwidth_bounds="),
    (lambda: fitted(flops=0.0), "flops_per_second=0.0"),
    (lambda: fitted(form="x"), "form='x' is unknown"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_arguments(act: Act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


# ---- files edited by hand -------------------------------------------------------------------------------------------


MISSING = object()


def assert_hand_edit_is_named(
    saved: Any, where: Sequence[str | int], value: object, message: str, folder: Path
) -> None:
    """The file that `saved` writes is refused with `value` at the place `where`; MISSING: without it."""
    path = folder / "file.json"
    saved.save(path)
    content = place = json.loads(path.read_text())
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    if value is MISSING:
        del place[where[-1]]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"file\.json is not a valid .*: {message}.* again\.$"):
        type(saved).load(path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["version"], 2, r"version: Input should be 1 \(found 2\)"),
        (["draft_max_rows"], 0, "draft_max_rows=0 must be null or"),
        (["key", "dtype"], None, r"key\.dtype: .* string \(found None\)"),
        (["coefficients", "eta_D"], -1.0, r"coefficients: eta_D=-1\.0 is out of range"),
        (["coefficients", "c_V"], "1e-5", r"coefficients\.c_V: .* number \(found '1e-5'\)"),
        (["coefficients", "rho_kappa"], MISSING, r"coefficients\.rho_kappa: Field required"),
        (["coefficients", "speed"], 3.5, r"coefficients\.speed: Unexpected"),
        (["samples", 1, "seconds"], 0, r"samples\[1\]: seconds=0\.0 is out of range"),
    ],
)
def test_a_hand_edit_is_named(where: list[Any], value: Any, message: str, tmp_path: Path) -> None:
    assert_hand_edit_is_named(PROFILE, where, value, message, tmp_path)
