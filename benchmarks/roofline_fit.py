"""How well the roofline fits measured sweeps: errors of the times, signs of the toggle, in and out of sample.

    python -m benchmarks.roofline_fit --sweeps sweep_a100_*.csv --published published_fit_*.json
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spec_trl.scheduling.fit import BANDWIDTH_SHARE, THRESHOLDS, Diagnostics, Form, evaluate, fit
from spec_trl.scheduling.sweep import Sample

from .measure import Finding, Options, begin, shown, write_result
from .paper.published import read_fit, read_sweep


FORMS: tuple[Form, ...] = ("paper", "improved")


def halves(samples: list[Sample]) -> Iterator[tuple[str, list[Sample], list[Sample]]]:
    """(what was split, one half to fit, the other to test): every second γ, length and batch size, both ways round."""
    lengths, batches = sorted({s.length for s in samples}), sorted({s.batch for s in samples})
    gammas = sorted({s.draft_length for s in samples if s.mode == "verify"})
    for first in (0, 1):
        chosen = set(gammas[first::2])

        def of_gamma(s: Sample, inside: bool, chosen: set[int] = chosen) -> bool:
            # Targets, and drafts timed once for all γ, belong to both halves.
            return s.draft_length == 0 or (s.draft_length in chosen) is inside

        if len(gammas) > 1:
            yield "γ", [s for s in samples if of_gamma(s, True)], [s for s in samples if of_gamma(s, False)]
        length, batch = set(lengths[first::2]), set(batches[first::2])
        if len(lengths) > 1:
            yield "S", [s for s in samples if s.length in length], [s for s in samples if s.length not in length]
        if len(batches) > 1:
            yield "B", [s for s in samples if s.batch in batch], [s for s in samples if s.batch not in batch]


def measure(sweep: Path, published: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Fit one sweep with both forms, whole and by halves."""
    samples, roofline = read_sweep(sweep), read_fit(published).roofline
    constants, bounds = roofline.constants, tuple(share * options.bandwidth for share in BANDWIDTH_SHARE)
    fits: dict[str, Any] = {
        "published": {"coefficients": asdict(roofline.coefficients)} | whole(evaluate(roofline, samples))
    }
    for form in tqdm(FORMS, desc=constants.name):
        started = time.perf_counter()
        roofline, found = fit(samples, constants, options.flops, (bounds[0], bounds[1]), form)
        seconds = time.perf_counter() - started
        held_out: dict[str, list[Diagnostics]] = {}
        for split, chosen, rest in tqdm(list(halves(samples)), desc=form, leave=False):
            fitted, _ = fit(chosen, constants, options.flops, (bounds[0], bounds[1]), form)
            held_out.setdefault(split, []).append(evaluate(fitted, rest))
        fits[form] = {
            "coefficients": asdict(roofline.coefficients),
            "fit_seconds": seconds,
            "held_out": {split: average(found) for split, found in held_out.items()},
        } | whole(found)
    return {"model": constants.name, "sweep": sweep.name, "samples": len(samples), "fits": fits}


def whole(found: Diagnostics) -> dict[str, Any]:
    """`found` as plain data."""
    return {"in_sample": average([found]), "majority": [s.majority for s in found.signs], "points": found.points}


def average(found: list[Diagnostics]) -> dict[str, Any]:
    """Mean of the diagnostics of several folds, signs weighted by points."""
    total = sum(d.points for d in found)
    names = ("target_mape", "draft_mape", "verify_mape", "cycle_mape")
    return {name: statistics.fmean(vars(d)[name] for d in found) for name in names} | {
        "signs": [sum(d.points * d.signs[i].accuracy for d in found) / total for i in range(len(THRESHOLDS))]
    }


def findings(result: dict[str, Any]) -> list[Finding]:
    """Errors of the times and agreement of the signs, in and out of sample."""
    found = []
    for model in result["models"]:
        for form, fitted in model["fits"].items():
            what = f"{model['model']}, {form} form"
            for name, of in {"fitted and tested on all": fitted["in_sample"], **fitted.get("held_out", {})}.items():
                where = name if of is fitted["in_sample"] else f"fitted on every second {name}, tested on the others"
                for part in ("target", "verify", "cycle"):
                    each = f"{what}, {where}: mean error of the {part} time"
                    found.append(Finding(each, of[f"{part}_mape"], "%", "measured"))
                for threshold, sign, majority in zip(THRESHOLDS, of["signs"], fitted["majority"], strict=True):
                    each = f"{what}, {where}: does speculation pay, at {threshold:g}"
                    found.append(Finding(each, sign, "%", f"majority in all {100 * majority:.1f} %"))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "roofline_fit", "")
    add = parser.add_argument
    add("--sweeps", nargs="+", type=Path, required=True, help="CSV files, one model each")
    add("--published", nargs="+", type=Path, required=True, help="published fits, one for each sweep")
    add("--flops", type=float, default=233.514e12, help="F_eff, FLOP/s")
    add("--bandwidth", type=float, default=2.039e12, help="peak bandwidth of the memory, B/s")
    parser.set_defaults(device="cpu")
    options = parser.read(arguments)
    if len(options.published) != len(options.sweeps):
        parser.error(
            f"--sweeps names {len(options.sweeps)} files and --published {len(options.published)}; give one per sweep."
        )
    machine = begin(options)
    models = [measure(*pair, options) for pair in zip(options.sweeps, options.published, strict=True)]
    result = {"options": shown(options), "models": models}
    title, setup = "The roofline against measured sweeps", (
        "Mean absolute errors, and how often prediction and measurement agree on whether speculation pays (τ = γ, the "
        "same threshold on both sides; ER App. E.4). The round is γ T_D + T_V."
    )
    write_result(options.output, "calibration", title, setup, machine, findings(result), result)


if __name__ == "__main__":
    main()
