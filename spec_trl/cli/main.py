"""The command ``spec-trl``."""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any, NoReturn

from .arguments import COMMANDS


MODULES = {
    "bench": "spec_trl.cli.bench",
    "calibrate": "spec_trl.efficient_rollout.commands.calibrate",
    "validate": "spec_trl.efficient_rollout.commands.validate",
    "predict": "spec_trl.efficient_rollout.commands.predict",
    "plot": "spec_trl.efficient_rollout.commands.plot",
    "report": "spec_trl.cli.report",
    "simulate": "spec_trl.specactor.commands.simulate",
}
_VERSIONED = ("spec_trl", "transformers", "torch", "trl")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is for those who ask for it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Prints what is installed. No package is imported for it: torch alone would take seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        found = []
        for name in _VERSIONED:
            try:
                found.append(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                found.append(f"{name} not installed")
        print(", ".join(found))
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = _Parser(
        prog="spec-trl",
        description="System-aware speculative rollouts: measure a machine, predict what speculation gains, see a run.",
        epilog="`spec-trl COMMAND --help` has each command's options and an example.",
    )
    text = f"print the versions of {', '.join(_VERSIONED)}"
    parser.add_argument("--version", action=_Version, nargs=0, help=text)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name, help=command.help, description=command.description, epilog=f"example:\n  {command.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_arguments(added)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 after one line about bad input on stderr."""
    arguments = build_parser().parse_args(argv)
    arguments.started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            import_module(MODULES[arguments.command]).run(arguments)
            return 0
        except ValueError as error:
            message = str(error)
        except OSError as error:  # a path that does not exist, is a folder, or must not be written
            message = f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
    print(f"spec-trl {arguments.command}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints no more than the message: where in our code a warning arose says nothing to a user."""
    print(f"warning: {message}", file=sys.stderr)
