"""How well the roofline fits measured sweeps: errors of the times, signs of the toggle, in and out of sample."""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spec_trl.efficient_rollout.fit import BANDWIDTH_SHARE, THRESHOLDS, Diagnostics, Form, evaluate, fit
from spec_trl.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.efficient_rollout.sweep import COLUMNS, Sample
from spec_trl.efficient_rollout.sweep import read_sweep as read_our_sweep
from spec_trl.scheduling.model_constants import ModelConstants

from .measure import Finding, add_machine_arguments, begin, shown, write_result
from .paper.published import read_sweep as read_published_sweep


FORMS: tuple[Form, ...] = ("paper", "improved")


def read_constants(path: Path) -> ModelConstants:
    """Constants of ER's published `model_constants_*.json`, or of the fields of `ModelConstants` as JSON."""
    content = json.loads(path.read_text())
    if "W_t" not in content:
        return ModelConstants(**content)
    return ModelConstants(
        name=content["model"],
        weight_bytes=content["W_t"],
        draft_weight_bytes=content["W_d"],
        dense_flops=content["C_dense"],
        attention_flops=content["C_attn"],
        kv_bytes=content["kappa_theoretical"],
    )


def read_published(path: Path, constants: ModelConstants) -> Roofline:
    """ER's published fit, `published_fit_*.json`."""
    content = json.loads(path.read_text())
    fitted = content["calibration"]
    coefficients = Coefficients(
        F_eff=fitted["F_eff"],
        BW_eff=content["hardware"]["BW_eff"],
        rho_kappa=fitted["kappa_eff"] / constants.kv_bytes,
        eta_D=fitted["eta_d"],
        c_T=fitted["c_T"] * 1e-6,
        c_D=fitted["c_D"] * 1e-6,
        c_V=fitted["c_V"] * 1e-6,
    )
    return Roofline(constants, coefficients)


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


def measure(sweep: Path, constants: ModelConstants, published: Path | None, options: argparse.Namespace) -> Any:
    """Fit one sweep with both forms, whole and by halves."""
    is_ours = sweep.read_text().startswith(",".join(COLUMNS))
    samples = read_our_sweep(sweep) if is_ours else read_published_sweep(sweep)
    bounds = tuple(share * options.bandwidth for share in BANDWIDTH_SHARE)
    fits: dict[str, Any] = {}
    if published is not None:
        roofline = read_published(published, constants)
        fits["published"] = {"coefficients": asdict(roofline.coefficients)} | whole(evaluate(roofline, samples))
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sweeps", nargs="+", type=Path, required=True, help="CSV files, one model each")
    parser.add_argument("--constants", nargs="+", type=Path, required=True, help="JSON, one for each sweep")
    parser.add_argument("--published", nargs="*", type=Path, default=[], help="published fits, one for each sweep")
    parser.add_argument("--flops", type=float, default=233.514e12, help="F_eff, FLOP/s")
    parser.add_argument("--bandwidth", type=float, default=2.039e12, help="peak bandwidth of the memory, B/s")
    add_machine_arguments(parser, "roofline_fit")
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    if len(options.constants) != len(options.sweeps) or len(options.published) not in (0, len(options.sweeps)):
        parser.error(
            f"--sweeps names {len(options.sweeps)} files, --constants {len(options.constants)} and --published "
            f"{len(options.published)}; give one of each per sweep."
        )
    return options


def main() -> None:
    options = parse_arguments()
    machine = begin(options)
    published = options.published or [None] * len(options.sweeps)
    models = [
        measure(sweep, read_constants(constants), fitted, options)
        for sweep, constants, fitted in zip(options.sweeps, options.constants, published, strict=True)
    ]
    result = {"options": shown(options), "models": models}
    title, setup = "The roofline against measured sweeps", (
        "Mean absolute errors, and how often prediction and measurement agree on whether speculation pays (τ = γ, the "
        "same threshold on both sides; ER App. E.4). The round is γ T_D + T_V."
    )
    write_result(options.output, "calibration", title, setup, machine, findings(result), result)


if __name__ == "__main__":
    main()
