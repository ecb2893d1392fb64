"""Declares the arguments of this folder's commands. This imports neither torch nor matplotlib."""

import argparse
from pathlib import Path

from ....cli.arguments import (
    DTYPES,
    Command,
    add_device,
    add_margin,
    add_option,
    figure_file,
    fraction,
    positive,
    whole_number,
    whole_numbers,
)
from ....generation.planner.acceptance import expected_block_efficiency


def add_block_efficiency(parser: argparse.ArgumentParser) -> None:
    """Adds --block-efficiency and --acceptance, of them at most one."""
    add = parser.add_mutually_exclusive_group().add_argument
    add("--block-efficiency", type=positive, metavar="TAU", help="τ: tokens per verified block, bonus included")
    text = "chance that a draft token is accepted; gives τ for each γ"
    add("--acceptance", type=fraction, metavar="ALPHA", help=text)


def block_efficiency_of(arguments: argparse.Namespace, draft_length: int) -> float:
    """τ for γ by what `add_block_efficiency` added; γ itself where nothing was given (ER App. E.4)."""
    if arguments.acceptance is not None:
        return expected_block_efficiency(arguments.acceptance, draft_length)
    if arguments.block_efficiency is None:
        return float(draft_length)
    if not 1 <= arguments.block_efficiency <= draft_length + 1:
        raise ValueError(
            f"--block-efficiency {arguments.block_efficiency:g} is impossible with {draft_length} draft tokens: "
            f"it lies between 1 and {draft_length + 1}. Give --acceptance for several draft lengths at once."
        )
    return float(arguments.block_efficiency)


def _calibrate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder of a model, or a config.json: then with random weights")
    add("--random-weights", action="store_true", help="do not read the weights, even where there are some")
    add("--dtype", default="bfloat16", choices=DTYPES, help="of the target's weights (%(default)s)")
    add_device(parser)
    add_option(parser, "--quantization", "draft_quantization")
    add_option(parser, "--kernel", "draft_kernel")
    add_option(parser, "--lm-head", "efficient_rollout.lm_head")
    add("--max-batch-size", type=whole_number, default=64, metavar="B", help="most rows in flight (%(default)s)")
    add("--max-length", type=whole_number, default=4096, metavar="S", help="longest row in tokens (%(default)s)")
    add("--budget", type=positive, default=180.0, metavar="SECONDS", help="time for the sweep (%(default)g)")
    add("--output", "-o", type=Path, default=Path("profile.json"), help="profile to write (%(default)s)")
    add("--csv", type=Path, metavar="SWEEP", help="also write the measured times here")


def _validate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("profile", type=Path, metavar="PROFILE", help="profile; with --refit also a model's config.json")
    add("--csv", type=Path, metavar="SWEEP", help="measured times (default: those in the profile)")
    add("--refit", action="store_true", help="also fit the times, in the paper's form and in the improved one")
    add("--flops", type=positive, help="--refit: effective FLOP/s of matrix products (default: the profile's)")
    add(
        "--bandwidth",
        type=positive,
        help="--refit: peak bandwidth in B/s (default: within a factor of four of the profile's)",
    )
    add("-o", "--output", type=Path, metavar="JSON", help="write the last fit of the table as a profile")


def _predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("profile", type=Path, metavar="PROFILE", help="JSON that `spec-trl calibrate` wrote")
    add("--batch", type=whole_numbers, default=[1, 8, 32], metavar="B,B", help="active rows (1,8,32)")
    add("--length", type=whole_numbers, default=[512, 2048], metavar="S,S", help="cached tokens per row (512,2048)")
    add("--draft-length", type=whole_numbers, default=[5], metavar="N,N", help="γ, draft tokens per round (5)")
    add_block_efficiency(parser)
    add_margin(parser)


def _plot(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("profile", type=Path, nargs="?", metavar="PROFILE", help="JSON that `spec-trl calibrate` wrote")
    add("--ladder", type=Path, metavar="LADDER", help="draw this draft ladder (*.ladder.json) instead of a boundary")
    add("--csv", type=Path, metavar="SWEEP", help="measured times (default: those in the profile)")
    add("--draft-length", type=whole_numbers, metavar="N,N", help="panels (default: all that were measured)")
    add_block_efficiency(parser)
    add_margin(parser, default=None)
    add("-o", "--output", type=figure_file, help="PNG, PDF or SVG file (boundary.png, or ladder.png)")


COMMANDS = {
    "calibrate": Command(
        """\
Measures this machine with a model and its quantized copy, and fits the roofline (ER App. E.3).

Writes a profile that the option `efficient_rollout.profile` takes. Speed depends on the model's shape alone, so a
folder with nothing but a config.json will do: its weights are then random.""",
        "spec-trl calibrate path/to/model --dtype bfloat16 --output profile.json --csv sweep.csv",
        _calibrate,
    ),
    "validate": Command(
        """\
Compares a profile with measured times, and can fit a sweep anew (ER App. E.3, E.4).

Prints the mean absolute error of target, draft, verify and round times, and how often the predicted speedup lies on
the measured one's side of 1 and of 1.05 when every draft is accepted (τ = γ), with the share that always guessing the
more frequent side would reach. Times are the profile's own, or those of a CSV. To fit a sweep, a model's config.json
will do in place of a profile (as a 16-bit target with a 4-bit copy of its projections).""",
        """spec-trl validate profile.json --csv sweep.csv --refit
  spec-trl validate config.json --csv sweep.csv --refit --flops 233.5e12 --bandwidth 2.039e12 -o new.json""",
        _validate,
    ),
    "predict": Command(
        """\
Predicts step times and speedups from a profile, and says where sd_toggle="roofline" drafts (ER Eq. 1 and 3).""",
        "spec-trl predict profile.json --batch 1,8,32 --length 512,2048 --draft-length 5,7 --acceptance 0.9",
        _predict,
    ),
    "plot": Command(
        """\
Draws the toggle's boundary with measured points (ER Fig. 11), or a draft ladder (SpecActor Fig. 10a).

One panel per draft length: the background is the speedup that the profile predicts over cached length and batch, the
blue line is 1 + ε, green circles are measured points where speculation won, red crosses where it lost. Without
--block-efficiency or --acceptance every draft counts as accepted (τ = γ), as in the paper's validation.

With --ladder, one panel per profiled batch: the speedup of each drafting method over the acceptance p of its tokens,
the line at its best γ and the profiled cells as points.""",
        """spec-trl plot profile.json --acceptance 0.9 -o boundary.png
  spec-trl plot --ladder profile.ladder.json -o ladder.png""",
        _plot,
    ),
}
