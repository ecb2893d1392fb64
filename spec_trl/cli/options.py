"""Arguments that several commands share, and what checks them. Importing this imports neither torch nor matplotlib."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..generation.configuration import OPTIONS, SpeculativeConfig
from ..generation.registry import needing_assistant


MARGIN = SpeculativeConfig.sd_margin
"""ε of ER §3.2, the predicted gain that speculation needs."""


def add_option(parser: argparse.ArgumentParser, flag: str, name: str, **changes: Any) -> None:
    """Adds `flag` for the option `name` of :class:`SpeculativeConfig`, with its default and help. `changes` are
    arguments of `add_argument` and go first."""
    default = OPTIONS[name].default
    text = " ".join(default) if isinstance(default, tuple) else "%(default)s"
    shown = "" if default is None else f" (default: {text})"
    given = {"default": default, "help": OPTIONS[name].metadata["help"] + shown} | changes
    parser.add_argument(flag, **given)


def _number(what: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """A type for argparse: a finite number that `accepts` takes, described by `what`."""

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
    """An integer of at least 1."""
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
    """Adds --margin, ε; with `default` None a command sees whether it was given."""
    text = f"{OPTIONS['sd_margin'].metadata['help']} ({MARGIN})"
    add_option(parser, "--margin", "sd_margin", type=fraction, default=default, help=text)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Plain text in columns, right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in [header, *rows])
