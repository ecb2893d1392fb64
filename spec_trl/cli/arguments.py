"""What `bench` and `report` take, and what their --help says. This imports neither torch nor matplotlib."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .options import (
    add_margin,
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
    """What the --help of a command says, its examples, and its arguments."""

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
    add_device(parser)
    add("--seconds", type=positive, default=180.0, metavar="S", help="time in all, loading included (%(default)g)")
    add("--seed", type=int, default=0, help="of the sampling (%(default)s)")


def _report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="output_dir of a SpecGRPOTrainer run, or its rollout_log.jsonl")
    add("-o", "--output", type=Path, metavar="DIR", help="folder to write to (default: RUN/report)")
    add("--profile", type=Path, metavar="JSON", help="roofline profile (default: the one that the run names)")
    add_margin(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds --device."""
    parser.add_argument("--device", help="e.g. cuda or cpu (default: cuda where there is one, else cpu)")


COMMANDS = {
    "bench": Command(
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
    "report": Command(
        """\
Draws a training run: PNG files, one HTML page that needs nothing else, and a summary on the terminal.

Step and rollout times, the completion curve, when speculation was on and who drafted for whom, draft length and block
efficiency, entropy against acceptance, block efficiency by depth, predicted against measured speedup, and the toggle's
boundary with the run's own rounds on it. A run that is still going on, or was killed, can be drawn too.""",
        "spec-trl report out --profile profile.json     (out: the output_dir of the run)",
        _report,
    ),
}
