"""Draws the toggle's boundary with measured points (ER Fig. 11).

One panel per draft length: the background is the speedup that the profile predicts over cached length and batch, the
blue line is 1 + ε, green circles are measured points where speculation won, red crosses where it lost. Without
--block-efficiency or --acceptance every draft counts as accepted (τ = γ), as in the paper's validation.
"""

import argparse
from pathlib import Path

from ..scheduling.profile import Profile
from ..scheduling.sweep import read_sweep
from .boundary import points_of_sweep, toggle_boundary
from .options import add_block_efficiency, add_margin, block_efficiency_of, whole_numbers


HELP = "draw the toggle's boundary with measured points"
EXAMPLE = "spec-trl plot profile.json --acceptance 0.9 -o boundary.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("profile", type=Path, metavar="PROFILE", help="JSON that `spec-trl calibrate` wrote")
    add("--csv", type=Path, metavar="SWEEP", help="measured times (default: those in the profile)")
    add("--draft-length", type=whole_numbers, metavar="N,N", help="panels (default: all that were measured)")
    add_block_efficiency(parser, required=False)
    add_margin(parser)
    add("-o", "--output", type=Path, default=Path("boundary.png"), help="PNG, PDF or SVG file (%(default)s)")


def run(arguments: argparse.Namespace) -> None:
    if arguments.output.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--output {arguments.output}: the name must end in .png, .pdf or .svg.")
    profile = Profile.load(arguments.profile)
    source = arguments.csv or arguments.profile
    points = points_of_sweep(
        read_sweep(arguments.csv) if arguments.csv is not None else profile.samples, block_efficiency_of(arguments)
    )
    measured = sorted({point.draft_length for point in points})
    if not points:
        raise ValueError(f"{source} holds no measured times to plot; give a sweep with --csv, or calibrate again.")
    wanted = arguments.draft_length or measured
    if missing := sorted(set(wanted) - set(measured)):
        raise ValueError(f"--draft-length {missing} was not measured; {source} has {measured}.")
    taus = {gamma: block_efficiency_of(arguments)(gamma) for gamma in wanted}
    chosen = [point for point in points if point.draft_length in taus]
    drawing = toggle_boundary(profile.roofline, chosen, taus, arguments.margin, profile.draft_max_rows)
    assert drawing is not None  # there are points
    drawing.figure.savefig(arguments.output, dpi=130)
    print(drawing.text)
    print(f"written: {arguments.output}")
