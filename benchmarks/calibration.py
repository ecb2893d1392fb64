"""Calibrates this machine for a model and judges the fit on times that it has not seen.

The grid of (B, S) is split like a chessboard; the roofline is fitted to one colour and tested on the other, both ways
round. Sign accuracy counts the (B, S, γ) where prediction and measurement agree on whether speculation pays, with
τ = γ and the same threshold on both sides (ER App. E.4).

    python -m benchmarks.calibration --model shape:qwen2.5-0.5b --threads 2
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spec_trl.measuring.fill_profile import calibrate
from spec_trl.scheduling.fit import Diagnostics, evaluate, fit
from spec_trl.scheduling.profile import Profile
from spec_trl.scheduling.sweep import Sample

from .measure import RESULTS, describe_machine, machine_line, markdown_table, write_result
from .models import DTYPES, load_model


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


def report(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    names = ["all times, fitted and tested", "half A, fitted on half B", "half B, fitted on half A"]
    rows = []
    for name, found in zip(names, [result["fit"], *result["held_out"]], strict=True):
        signs = [f"{100 * sign['accuracy']:.1f} ({100 * sign['majority']:.1f})" for sign in found["signs"]]
        errors = [f"{100 * found[f'{part}_mape']:.1f}" for part in ("target", "draft", "verify", "cycle")]
        rows.append([name, *errors, *signs, str(found["points"])])
    header = ["", "T_T", "T_D", "T_V", "round", "sign at 1 (majority)", "sign at 1.05 (majority)", "points"]
    return "\n".join(
        [
            f"# Calibration: {result['model']['model']}, {result['model']['dtype']}",
            "",
            machine_line(result["machine"]),
            "",
            f"Calibrated in {result['seconds']:.0f} s ({result['times']} times); the drafter's kernels serve up to "
            f"{result['draft_max_rows']} rows. Mean absolute errors and agreement in percent.",
            "",
            markdown_table(header, rows),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen2.5-0.5b", help="as in benchmarks.models (%(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=2100)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds for the sweep (%(default)g)")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--output", type=Path, default=RESULTS / "calibration.json")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = describe_machine(torch.device(options.device))
    loaded = load_model(options.model, DTYPES[options.dtype], options.device, measured=False)
    started = time.perf_counter()
    profile = calibrate(
        loaded.model,
        max_batch_size=options.max_batch_size,
        max_length=options.max_length,
        budget_seconds=options.budget,
    )
    seconds = time.perf_counter() - started
    result = {
        "machine": machine,
        "model": loaded.facts,
        "seconds": seconds,
        "times": len(profile.samples),
        "draft_max_rows": profile.draft_max_rows,
        "coefficients": asdict(profile.roofline.coefficients),
        "fit": profile.diagnostics,
        "held_out": [asdict(found) for found in held_out(profile)],
        "samples": [asdict(sample) for sample in profile.samples],
    }
    write_result(options.output, result, report(result))


if __name__ == "__main__":
    main()
