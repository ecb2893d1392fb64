"""Declares the arguments of `bench`, `certify` and `report`, and types and options that all commands share. This
imports neither torch nor matplotlib."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..generation.options import OPTIONS, SpeculativeConfig
from ..generation.registry import needing_assistant


DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Names that `dtype=` of transformers takes."""
MARGIN: float = SpeculativeConfig.efficient_rollout.margin
"""ε of ER §3.2, the predicted gain that speculation needs."""


@dataclass(frozen=True)
class Command:
    """Help text of a command, its examples, and its arguments."""

    description: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def add_option(parser: argparse.ArgumentParser, flag: str, name: str, **changes: Any) -> None:
    """Adds `flag` for the option `name` of :class:`SpeculativeConfig`, with its default and help. Arguments of
    `add_argument` in `changes` replace these."""
    default = OPTIONS[name].default
    text = " ".join(default) if isinstance(default, tuple) else "%(default)s"
    shown = "" if default is None else f" (default: {text})"
    given = {"default": default, "help": OPTIONS[name].metadata["help"] + shown} | changes
    parser.add_argument(flag, **given)


def _number(what: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Makes a type for argparse: a finite number that `accepts`, described by `what`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


positive = _number("a number above 0", lambda value: value > 0)
non_negative = _number("a number of at least 0", lambda value: value >= 0)
fraction = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)
_whole = _number("an integer of at least 1", lambda value: value >= 1 and value == int(value))


def whole_number(text: str) -> int:
    return int(_whole(text))


def whole_numbers(text: str) -> list[int]:
    """ "1,8,32" as integers of at least 1."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,8,32") from None
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} holds a number below 1")
    return numbers


def named_assistant(text: str) -> tuple[str, str]:
    """ "model=path/or/hub-id" as (strategy, path)."""
    kind, _, path = text.partition("=")
    if kind not in needing_assistant() or not path:
        kinds = ", ".join(needing_assistant())
        raise argparse.ArgumentTypeError(f"{text!r} is not KIND=MODEL with one of the kinds {kinds}")
    return kind, path


def figure_file(text: str) -> Path:
    """A file for a figure, in a folder that exists."""
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r}: the name must end in .png, .pdf or .svg")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.absolute().parent}; make it first")
    return path


def add_margin(parser: argparse.ArgumentParser, default: float | None = MARGIN) -> None:
    """Adds --margin, ε; `default` None shows whether the user set it."""
    name = "efficient_rollout.margin"
    text = f"{OPTIONS[name].metadata['help']} ({MARGIN})"
    add_option(parser, "--margin", name, type=fraction, default=default, help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="e.g. cuda or cpu (default: cuda where there is one, else cpu)")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Plain text in columns, right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in [header, *rows])


# ---- bench, certify and report --------------------------------------------------------------------------------------


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
    text = "of the weights (%(default)s, in which TRL loads a model; auto: the checkpoint's)"
    add("--dtype", default="float32", choices=["auto", *DTYPES], help=text)
    add_device(parser)
    add("--seconds", type=positive, default=180.0, metavar="S", help="time in all, loading included (%(default)g)")
    add("--seed", type=int, default=0, help="of the sampling (%(default)s)")


def _certify(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder of a causal LM, served by spec_trl or not")
    text = "of the weights, one after the other (float32 bfloat16)"
    add("--dtype", nargs="+", default=["float32", "bfloat16"], choices=DTYPES, help=text)
    add("--length", type=whole_number, default=24, metavar="N", help="tokens of a row that are compared (%(default)s)")
    add_device(parser)
    text = "file to write (%(default)s)"
    add("-o", "--output", type=Path, default=Path("certificate.json"), metavar="JSON", help=text)
    text = "compare rows alone and one draft length, and print no page: what is done with fewer instructions"
    add("--short", action="store_true", help=text)


def _report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="output_dir of a run, or its rollout_log.jsonl")
    add("-o", "--output", type=Path, metavar="DIR", help="folder to write to (default: RUN/report)")
    add("--profile", type=Path, metavar="JSON", help="roofline profile (default: the one that the run names)")
    add_margin(parser)


COMMANDS = {
    "bench": Command(
        """\
Measures what speculation gains for a model on this machine, and prints a config to paste.

Continues the same prompts with transformers' generate, with assistant_strategy="none" and "auto", with the drafters
that --assistant names, and with two of those that the model has by itself, which a probe ranks first: its quantized
copy ("self") and lookups ("ngram", "history"), in every round. They take turns; medians are shown, next to the
predictions of a roofline profile where the cache holds one. Completions are compared with those of "none", token for
token. A config is recommended where enough was measured, and tokens per block explain the gain. If --seconds is too
short for that, the command says how many it takes before it measures.""",
        """spec-trl bench Qwen/Qwen2.5-0.5B-Instruct
  spec-trl bench path/to/model --batch 1,16 --length 256 --prompts prompts.jsonl --assistant model=path/to/small""",
        _bench,
    ),
    "certify": Command(
        """\
Samples the same rows of text in many situations and compares the bits of their log-probabilities: rows alone, in
batches, in another order, with drafts ("self", "ngram", "history", "auto"), with other numbers of threads, and as a
CPU with fewer instructions would. The last two lines are transformers' own forward. Prints a page for each dtype, and
writes it as JSON with the machine, versions and a hash: machines with one hash computed the same.""",
        """spec-trl certify Qwen/Qwen2.5-0.5B-Instruct
  spec-trl certify path/to/model --dtype bfloat16 --output certificate.json""",
        _certify,
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
