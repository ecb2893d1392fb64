"""Declares the arguments of `spec-trl simulate`. This imports neither torch nor matplotlib."""

import argparse
from pathlib import Path

from ....cli.arguments import Command, figure_file


def _simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cluster", type=Path, metavar="YAML", help="description of a cluster and its rollouts")
    add("--seed", type=int, default=0, help="of the requests' lengths and acceptance (%(default)s)")
    add("-o", "--output", type=figure_file, metavar="FILE", help="PNG, PDF or SVG: which worker did what, and when")


COMMANDS = {
    "simulate": Command(
        """\
Simulates a training step's rollout on a cluster, for each way to speculate there (SpecActor §4, §5).

The YAML file states GPUs, requests, the distribution of response lengths, seconds of forwards, and acceptance. Each
method is planned by the classes that plan real rollouts: which GPUs draft and which verify, and the window w that a
drafter may run ahead. Printed are the plan, the rollout's and the step's speed next to plain decoding, and the share
of the workers' time in which they idle.""",
        "spec-trl simulate examples/clusters/dapo-32b-20k.yaml -o workers.png",
        _simulate,
    ),
}
