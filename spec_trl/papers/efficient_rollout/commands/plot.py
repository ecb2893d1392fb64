"""Runs `spec-trl plot`: draws the toggle's boundary (ER Fig. 11), or a draft ladder (SA Fig. 10a)."""

import argparse
from functools import partial
from pathlib import Path

from ....cli.arguments import MARGIN
from ....cli.plotting import Drawing
from ...specactor.commands.ladder_figure import draft_ladder
from ...specactor.ladder import Ladder
from ..profile import Profile
from ..sweep import read_sweep
from .arguments import block_efficiency_of
from .boundary import points_of_sweep, toggle_boundary


_OF_THE_BOUNDARY = ("csv", "draft_length", "block_efficiency", "acceptance", "margin")


def run(arguments: argparse.Namespace) -> None:
    if arguments.ladder is None and arguments.profile is None:
        raise ValueError("PROFILE is missing; name one that `spec-trl calibrate` wrote, or give --ladder.")
    if arguments.ladder is not None:
        given = [name for name in _OF_THE_BOUNDARY if vars(arguments)[name] is not None]
        if unfit := ["PROFILE"] * (arguments.profile is not None) + [f"--{n.replace('_', '-')}" for n in given]:
            raise ValueError(f"--ladder draws a ladder alone; leave out {', '.join(unfit)}, or leave out --ladder.")
    output = arguments.output or Path("boundary.png" if arguments.ladder is None else "ladder.png")
    drawing = _boundary(arguments) if arguments.ladder is None else draft_ladder(Ladder.load(arguments.ladder))
    drawing.figure.savefig(output, dpi=130)
    print(drawing.text)
    print(f"written: {output}")


def _boundary(arguments: argparse.Namespace) -> Drawing:
    profile = Profile.load(arguments.profile)
    source = arguments.csv or arguments.profile
    samples = profile.samples if arguments.csv is None else read_sweep(arguments.csv)
    points = points_of_sweep(samples, partial(block_efficiency_of, arguments))
    measured = sorted({point.draft_length for point in points})
    if not points:
        raise ValueError(f"{source} holds no measured times to plot; give a sweep with --csv, or calibrate again.")
    wanted = arguments.draft_length or measured
    if missing := sorted(set(wanted) - set(measured)):
        raise ValueError(f"--draft-length {missing} was not measured; {source} has {measured}.")
    taus = {gamma: block_efficiency_of(arguments, gamma) for gamma in wanted}
    chosen = [point for point in points if point.draft_length in taus]
    margin = MARGIN if arguments.margin is None else arguments.margin
    drawing = toggle_boundary(profile.roofline, chosen, taus, margin, profile.draft_max_rows)
    assert drawing is not None  # there are points
    return drawing
