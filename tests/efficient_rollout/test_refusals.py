"""What scheduling refuses, with the argument and the remedy."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_trl.efficient_rollout.draft_length import DraftLengthController
from spec_trl.efficient_rollout.fit import GemmMeasurement, effective_flops, evaluate, fit
from spec_trl.efficient_rollout.profile import Profile
from spec_trl.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.efficient_rollout.sweep import Sample
from spec_trl.scheduling.model_constants import ModelConstants
from spec_trl.specactor.assignment import greedy_assignments
from spec_trl.specactor.ladder import Ladder, Rung
from tests.efficient_rollout.test_profile import PROFILE


RUNG = Rung("self", 2, 3, 0.5, 0.1, 0.05)
LADDER = Ladder((RUNG, replace(RUNG, batch=16, draft_length=2), replace(RUNG, method="ngram")), "a shape")
COEFFICIENTS = Coefficients(F_eff=2e14, BW_eff=1.5e12, rho_kappa=0.5, eta_D=1.3, c_T=4e-5, c_D=7e-5, c_V=1.5e-4)
CONSTANTS = ModelConstants("m", 15e9, 5e9, 14e9, 4e5, 5e4, 12e9, 3e9, experts=8, experts_per_token=2)
SAMPLES = [
    Sample(1, 128.0, 0, "target", 0.01), Sample(1, 128.0, 3, "draft", 0.01), Sample(1, 128.0, 3, "verify", 0.02)
]  # fmt: skip


def algorithm_3(**changes: Any) -> object:
    """Its arguments for nobody."""
    arguments: dict[str, Any] = dict(requests={}, methods="xy", freed=[], workers_of={}, load={}, assigned={})
    return greedy_assignments(**(arguments | dict(max_batch=1, ladder_order="xy") | changes))


def fitted(samples: list[Sample] = SAMPLES, flops: float = 1e14, bandwidth: Any = (1e12, 2e12), **form: Any) -> object:
    return fit(samples, CONSTANTS, flops, bandwidth, **form)


Act = Callable[[], object]
REFUSED: list[tuple[Act, str]] = [
    # assignment
    (lambda: algorithm_3(methods=[]), "methods is empty"),
    (lambda: algorithm_3(ladder_order=["x"]), r"ladder_order=\['x'\] lacks \['y'\]"),
    (lambda: algorithm_3(max_batch=0), "max_batch=0 is out of range"),
    # ladder
    (lambda: LADDER.speedup("eagle3", 1.5, 1, 2), r"method='eagle3' .*, which has \['self', 'ngram'\]"),
    (lambda: LADDER.speedup("self", 4.01, 1, 3), r"block_efficiency=4.01 of 'self' .*; it must be 1 to γ \+ 1 = 4"),
    (lambda: LADDER.speedup("self", math.nan, 1, 3), "block_efficiency=nan of 'self' is out of range"),
    (lambda: LADDER.speedup("self", 1.5, 0, 3), "batch=0 is out of range"),
    (lambda: LADDER.speedup("self", 1.5, 16, 6), r"draft_length=6 of 'self' .* near batch 16; choose one of \[2\]"),
    (lambda: replace(RUNG, method="none"), "method='none' must be the name of a drafter"),
    (lambda: replace(RUNG, method=3), "method=3 must be the name"),
    (lambda: replace(RUNG, batch=0), "batch=0 is out of range"),
    (lambda: replace(RUNG, draft_length=0), "draft_length=0 is out of range"),
    (lambda: replace(RUNG, draft_length=65), "draft_length=65 is out of range; it must be 1 to 64"),
    (lambda: replace(RUNG, acceptance=1.1), "acceptance=1.1 is out of range; it must be at least 0 and at most 1"),
    (lambda: replace(RUNG, seconds=0.0), "seconds=0.0 is out of range"),
    (lambda: replace(RUNG, plain_seconds=math.inf), "plain_seconds=inf is out of range"),
    (lambda: Ladder((), ""), "rungs is empty"),
    (lambda: Ladder((RUNG, replace(RUNG, seconds=0.2)), ""), r"rungs has \('self', 2, 3, 0.5\).* twice"),
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
    # draft length
    (lambda: DraftLengthController([7, 5]), r"draft_lengths=\[7, 5\] is not ascending; use \[5, 7\]"),
    (lambda: DraftLengthController([]), r"draft_lengths=\[\] must be a list of at least one integer"),
    (lambda: DraftLengthController([5, 7.5]), "draft_lengths=.* must be a list of at least one integer"),
    (lambda: DraftLengthController([0, 5]), r"draft_lengths=\[0, 5\] must lie between 1 and 64"),
    (lambda: DraftLengthController([5, 65]), "must lie between 1 and 64"),
    (lambda: DraftLengthController(initial=6), r"=6 is not one of draft_lengths=\[5, 7, 9, 11\].*draft_lengths=\[6\]"),
    (lambda: DraftLengthController(up=1.1), "draft_length_up=1.1 must lie between 0 and 1"),
    (lambda: DraftLengthController(up=0.8, down=0.8), "draft_length_down=0.8 .* below draft_length_up=0.8"),
    (lambda: DraftLengthController(down=0.0), "draft_length_down=0.0 must be above 0"),
    (lambda: DraftLengthController(patience=0), "draft_length_patience=0 must be an integer of at least 1"),
    (lambda: DraftLengthController(patience=1.5), "draft_length_patience=1.5 must be an integer of at least 1"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_arguments(act: Act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


# ---- files edited by hand -------------------------------------------------------------------------------------------


MISSING = object()


@pytest.mark.parametrize(
    ("saved", "where", "value", "message"),
    [
        (PROFILE, ["version"], 2, r"version: Input should be 1 \(found 2\)"),
        (PROFILE, ["draft_max_rows"], 0, "draft_max_rows=0 must be null or"),
        (PROFILE, ["key", "dtype"], None, r"key\.dtype: .* string \(found None\)"),
        (PROFILE, ["coefficients", "eta_D"], -1.0, r"coefficients: eta_D=-1\.0 is out of range"),
        (PROFILE, ["coefficients", "c_V"], "1e-5", r"coefficients\.c_V: .* number \(found '1e-5'\)"),
        (PROFILE, ["coefficients", "rho_kappa"], MISSING, r"coefficients\.rho_kappa: Field required"),
        (PROFILE, ["coefficients", "speed"], 3.5, r"coefficients\.speed: Unexpected"),
        (PROFILE, ["samples", 1, "seconds"], 0, r"samples\[1\]: seconds=0\.0 is out of range"),
        (LADDER, ["version"], 2, r"version: Input should be 1 \(found 2\)"),
        (LADDER, ["rungs"], [], "rungs is empty"),
        (LADDER, ["rungs", 1, "batch"], 1.5, r"rungs\[1\]\.batch: .* valid integer \(found 1\.5\)"),
        (LADDER, ["rungs", 1], vars(RUNG), "rungs has .* twice"),
    ],
)
def test_a_hand_edit_is_named(
    saved: Profile | Ladder, where: list[Any], value: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
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
