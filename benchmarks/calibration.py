"""Calibrates this machine for a model and judges the fit on times that it has not seen.

The grid of (B, S) is split like a chessboard; the roofline is fitted to one colour and tested on the other, both ways
round. Sign accuracy counts the (B, S, γ) where prediction and measurement agree on whether speculation pays, with
τ = γ and the same threshold on both sides (ER App. E.4).

    python -m benchmarks.calibration --model shape:qwen2.5-0.5b --threads 2
"""

import argparse
from dataclasses import asdict
from typing import Any

from spec_trl.efficient_rollout.fill_profile import calibrate
from spec_trl.efficient_rollout.fit import Diagnostics, evaluate, fit
from spec_trl.efficient_rollout.profile import Profile
from spec_trl.efficient_rollout.sweep import Sample

from .measure import Finding, add_machine_arguments, begin, shown, stopwatch, write_result
from .models import DTYPES, load_model, model_line


def halves(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The two colours of the chessboard over (B, S)."""
    batches = sorted({s.batch for s in samples})
    lengths = sorted({s.length for s in samples})
    colours: tuple[list[Sample], list[Sample]] = ([], [])
    for sample in samples:
        colours[(batches.index(sample.batch) + lengths.index(sample.length)) % 2].append(sample)
    return colours


def held_out(profile: Profile) -> list[Diagnostics]:
    """Fitted on one half, tested on the other, both ways round."""
    one, other = halves(profile.samples)
    bounds = (0.25 * profile.roofline.coefficients.BW_eff, 4 * profile.roofline.coefficients.BW_eff)
    found = []
    for train, test in ((one, other), (other, one)):
        roofline, _ = fit(train, profile.roofline.constants, profile.roofline.coefficients.F_eff, bounds)
        found.append(evaluate(roofline, test))
    return found


def findings(result: dict[str, Any]) -> list[Finding]:
    """Errors of the times and agreement of the signs, in and out of sample."""
    found = [Finding("time that calibrating takes", result["seconds"], "s")]
    names = ("fitted and tested on all times", "tested on half A, fitted on B", "tested on half B, fitted on A")
    for name, of in zip(names, [result["fit"], *result["held_out"]], strict=True):
        for part in ("target", "draft", "verify", "cycle"):
            found.append(Finding(f"{name}: mean error of the {part} time", of[f"{part}_mape"], "%", "measured"))
        for sign in of["signs"]:
            what = f"{name}: does speculation pay, at {sign['threshold']:g}"
            found.append(Finding(what, sign["accuracy"], "%", f"majority {100 * sign['majority']:.1f} %"))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen2.5-0.5b", help="as in benchmarks.models (%(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=2100)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for the sweep (%(default)g)")
    add_machine_arguments(parser, "calibration")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    machine = begin(options)
    loaded = load_model(options.model, DTYPES[options.dtype], options.device, measured=False)
    with stopwatch(loaded.model.device) as watch:
        profile = calibrate(
            loaded.model,
            max_batch_size=options.max_batch_size,
            max_length=options.max_length,
            budget_seconds=options.budget,
        )
    result = {
        "options": shown(options),
        "model": loaded.facts,
        "seconds": watch.value,
        "times": len(profile.samples),
        "draft_max_rows": profile.draft_max_rows,
        "coefficients": asdict(profile.roofline.coefficients),
        "fit": profile.diagnostics,
        "held_out": [asdict(found) for found in held_out(profile)],
    }
    setup = (
        f"{len(profile.samples)} times; the drafter's kernels serve up to {profile.draft_max_rows} rows. Signs: how "
        "often prediction and measurement agree, with τ = γ and the same threshold on both sides."
    )
    title = f"Calibration: {model_line(loaded.facts)}"
    write_result(options.output, "calibration", title, setup, machine, findings(result), result)


if __name__ == "__main__":
    main()
