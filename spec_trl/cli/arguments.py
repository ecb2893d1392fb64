"""What each command takes, and what `--help` says of it. Reading arguments imports neither torch nor matplotlib."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .options import (
    add_block_efficiency,
    add_margin,
    add_option,
    figure_file,
    named_assistant,
    non_negative,
    positive,
    whole_number,
    whole_numbers,
)


DTYPES = ("bfloat16", "float16", "float32", "float64")
"""As transformers' own `dtype=` takes them."""


@dataclass(frozen=True)
class Command:
    """One command: its line in `spec-trl --help`, what its own --help says, examples, and its arguments.

    What it does is `run(arguments)` of the module of its name in this folder.
    """

    help: str
    description: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def _bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder of a causal LM")
    add("--batch", type=whole_numbers, default=[1, 8], metavar="B,B", help="rows decoded together (1,8)")
    add("--length", type=whole_number, default=128, metavar="N", help="longest completion in tokens (%(default)s)")
    add("--draft-length", type=whole_numbers, default=[3, 7], metavar="N,N", help="γ, draft tokens per round (3,7)")
    text = "also measure this drafter; KIND is model, eagle3 or dflash (may be given several times)"
    add("--assistant", type=named_assistant, action="append", default=[], metavar="KIND=MODEL", help=text)
    add("--prompts", type=Path, metavar="FILE", help=".txt, .jsonl or .json (default: built-in ones)")
    add("--temperature", type=non_negative, default=1.0, metavar="T", help="0 decodes greedily (%(default)g)")
    text = "of the weights (%(default)s, in which SpecGRPOTrainer loads a model; auto: the checkpoint's)"
    add("--dtype", default="float32", choices=["auto", *DTYPES], help=text)
    _add_device(parser)
    add("--seconds", type=positive, default=180.0, metavar="S", help="time in all, loading included (%(default)g)")
    add("--seed", type=int, default=0, help="of the sampling (%(default)s)")


def _calibrate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder of a model, or a config.json: then with random weights")
    add("--random-weights", action="store_true", help="do not read the weights, even where there are some")
    add("--dtype", default="bfloat16", choices=DTYPES, help="of the target's weights (%(default)s)")
    _add_device(parser)
    add_option(parser, "--quantization", "draft_quantization")
    add_option(parser, "--kernel", "draft_kernel")
    add_option(parser, "--lm-head", "draft_lm_head")
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


def _report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="output_dir of a SpecGRPOTrainer run, or its rollout_log.jsonl")
    add("-o", "--output", type=Path, metavar="DIR", help="folder to write to (default: RUN/report)")
    add("--profile", type=Path, metavar="JSON", help="roofline profile (default: the one that the run names)")
    add_margin(parser)


def _simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cluster", type=Path, metavar="YAML", help="description of a cluster and its rollouts")
    add("--seed", type=int, default=0, help="of the requests' lengths and acceptance (%(default)s)")
    add("-o", "--output", type=figure_file, metavar="FILE", help="PNG, PDF or SVG: which worker did what, and when")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="e.g. cuda or cpu (default: cuda where there is one, else cpu)")


COMMANDS = {
    "bench": Command(
        "measure what a model gains on this machine, and recommend a config",
        """\
Measures what speculation gains for a model on this machine, and prints a config to paste.

Continues the same prompts with transformers' generate, with assistant_strategy="none" and "auto", and with each
drafter that the model can have, in every round: its own quantized copy ("self"), lookups ("ngram", "history"), and
those that --assistant names. They take turns; medians are shown, next to the predictions of a roofline profile where
the cache holds one. Completions are compared with those of "none", token for token. A config is recommended where
enough was measured, and tokens per block explain the gain.""",
        """spec-trl bench Qwen/Qwen2.5-0.5B-Instruct
  spec-trl bench path/to/model --batch 1,16 --length 256 --prompts prompts.jsonl --assistant model=path/to/small""",
        _bench,
    ),
    "calibrate": Command(
        "measure this machine with a model and write a profile",
        """\
Measures this machine with a model and its quantized copy, and fits the roofline (ER App. E.3).

Writes a profile that `roofline_profile=` of SpecGRPOConfig takes. Speed depends on the model's shape alone, so a
folder with nothing but a config.json will do: its weights are then random.""",
        "spec-trl calibrate path/to/model --dtype bfloat16 --output profile.json --csv sweep.csv",
        _calibrate,
    ),
    "validate": Command(
        "compare a profile with measured times, or fit a sweep anew",
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
        "predict step times and speedups from a profile",
        """\
Predicts step times and speedups from a profile, and says where sd_toggle="roofline" drafts (ER Eq. 1 and 3).""",
        "spec-trl predict profile.json --batch 1,8,32 --length 512,2048 --draft-length 5,7 --acceptance 0.9",
        _predict,
    ),
    "plot": Command(
        "draw the toggle's boundary with measured points, or a draft ladder",
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
    "report": Command(
        "draw a training run: PNG files and one HTML page",
        """\
Draws a training run: PNG files, one HTML page that needs nothing else, and a summary on the terminal.

Step and rollout times, the completion curve, when speculation was on and who drafted for whom, draft length and block
efficiency, entropy against acceptance, block efficiency by depth, predicted against measured speedup, and the toggle's
boundary with the run's own rounds on it. A run that is still going on, or was killed, can be drawn too.""",
        "spec-trl report out --profile profile.json     (out: the output_dir of the run)",
        _report,
    ),
    "simulate": Command(
        "simulate rollouts on a cluster that a YAML file describes, and plan them",
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
