"""The fits and sweeps that the EfficientRollout authors published, as a profile of ours.

    python -m benchmarks.paper.published published_fit_qwen257b.json sweep_a100_tp1_qwen257b.csv -o published.json
    spec-trl validate published.json --refit --flops 233.5e12 --bandwidth 2.039e12   # their accuracy, and our fits
    spec-trl plot published.json                                                     # their Fig. 11
"""

import argparse
import csv
import json
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from spec_trl.generation.planner.model_constants import ModelConstants, ProfileKey
from spec_trl.papers.efficient_rollout.profile import Profile
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.sweep import Mode, Sample, check_samples, points


MICROSECOND = 1e-6  # their c_T, c_D, c_V are in µs per row
COLUMNS = ("batch", "seq", "gamma", "mode", "median_ms")
MODES: dict[str, Mode] = {"target_decode": "target", "drafter_decode": "draft", "target_verify": "verify"}
SECOND_TARGET = "target_decode_sd"
"""Their fourth mode times the target a second time; it is skipped."""
INCLUDED_DRAFT_SHARE = 0.7
"""Verify times that exceed the target's by at least this share of γ·T_D contain the draft."""


def read_fit(path: Path) -> Profile:
    """A published fit (`published_fit_*.json`) as a profile without samples.

    Raises:
        ValueError: a field is missing, of the wrong type or out of range; the message names file and field.
    """
    content = json.loads(path.read_text())

    def entry(part: str, name: str, kind: type) -> Any:
        value = content.get(part, {}).get(name)
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"{path}: {part}.{name} is {value!r} where a {kind.__name__} belongs; restore the file.")
        return kind(value)

    names = "W_t", "W_d", "C_dense", "C_attn", "kappa_theoretical"
    constants = ModelConstants(entry("model", "name", str), *(entry("model", name, float) for name in names))
    coefficients = Coefficients(
        F_eff=entry("calibration", "F_eff", float),
        BW_eff=entry("hardware", "BW_eff", float),
        rho_kappa=entry("calibration", "kappa_eff", float) / constants.kv_bytes,
        eta_D=entry("calibration", "eta_d", float),
        c_T=entry("calibration", "c_T", float) * MICROSECOND,
        c_D=entry("calibration", "c_D", float) * MICROSECOND,
        c_V=entry("calibration", "c_V", float) * MICROSECOND,
    )
    # What their files do not say is in the paper: two-byte weights (App. E.3), W4A16 Marlin kernels (App. C.2).
    key = ProfileKey(entry("hardware", "gpu", str), constants.name, "16 bit", "w4", "marlin")
    return Profile(key, Roofline(constants, coefficients), None, {}, date.today().isoformat())


def read_sweep(path: Path) -> list[Sample]:
    """A published sweep (`sweep_*.csv`).

    Verify times are corrected by γ·T_D where the timer had included the draft. Rows of batch 0 are an aggregate and
    skipped. A few missing draft or verify rows are named in one warning.

    Raises:
        ValueError: a column is missing, a value is bad, or too many rows are missing.
    """
    samples = []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or [])]:
            raise ValueError(f"{path} lacks the columns {missing}; restore the published file.")
        for row in reader:
            if row["mode"] == SECOND_TARGET or row["batch"] == "0":
                continue
            try:
                mode, seconds = MODES[row["mode"]], float(row["median_ms"]) / 1e3
                draft_length = 0 if mode == "target" else int(row["gamma"])
                samples.append(Sample(int(row["batch"]), float(row["seq"]), draft_length, mode, seconds))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}; restore the published file.") from None
    if gaps := check_samples(samples, str(path)):
        warnings.warn(gaps, stacklevel=2)
    return _without_included_draft(samples)


def _without_included_draft(samples: list[Sample]) -> list[Sample]:
    """Takes γ·T_D off the verify times where their median excess over the target shows that it is in them."""
    known = {(p.batch, p.length, p.draft_length): p for p in points(samples)}
    excess = [(p.verify - p.target) / (p.draft_length * p.draft) for p in known.values()]
    if statistics.median(excess) < INCLUDED_DRAFT_SHARE:
        return samples
    corrected = []
    for sample in samples:
        point = known.get((sample.batch, sample.length, sample.draft_length))
        if sample.mode != "verify":
            corrected.append(sample)
        elif point is not None:  # a verify row without its draft row cannot be corrected
            corrected.append(replace(sample, seconds=sample.seconds - point.draft_length * point.draft))
    return corrected


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fit", type=Path, help="published_fit_*.json")
    parser.add_argument("sweep", type=Path, help="sweep_*.csv")
    parser.add_argument("-o", "--output", type=Path, default=Path("published.json"), help="profile to write")
    options = parser.parse_args(arguments)
    try:
        replace(read_fit(options.fit), samples=read_sweep(options.sweep)).save(options.output)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
