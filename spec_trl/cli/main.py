"""Runs the command `spec-trl`."""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from ..papers import load


_ER, _SA = "papers.efficient_rollout.commands", "papers.specactor.commands"
COMMANDS = {
    "bench": ("cli", "measure what a model gains on this machine, and recommend a config"),
    "certify": ("cli", "compare the bits of a model's samples in many situations on this machine"),
    "calibrate": (_ER, "measure this machine with a model and write a profile"),
    "validate": (_ER, "compare a profile with measured times, or fit a sweep anew"),
    "predict": (_ER, "predict step times and speedups from a profile"),
    "plot": (_ER, "draw the toggle's boundary with measured points, or a draft ladder"),
    "report": ("cli", "draw a training run: PNG files and one HTML page"),
    "vllm-serve-command": ("vllm", "print the line that starts a vLLM server whose drafts follow the policy"),
    "simulate": (_SA, "simulate rollouts on a cluster that a YAML file describes, and plan them"),
}
"""By command: the folder that holds its arguments and its module, and its line in `spec-trl --help`."""

TRAININGS = {name: f"train as `trl {name}` does, from its YAML files, with drafts" for name in ("grpo", "rloo")}
"""Commands whose options are TRL's, ours and those of `accelerate launch`: `train.py` reads them."""

_VERSIONED = ("spec_trl", "transformers", "torch", "trl")


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage. `loaded`: the command whose arguments are loaded when parsed;
    folders of other commands are not imported."""

    loaded: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if (name := self.loaded) is not None:
            command = load(f"{COMMANDS[name][0]}.arguments").COMMANDS[name]
            self.loaded, self.description, self.epilog = None, command.description, f"example:\n  {command.examples}"
            command.add_arguments(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
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
    parser = _Parser(
        prog="spec-trl",
        description="System-aware speculative rollouts: measure a machine, predict what speculation gains, see a run.",
        epilog="`spec-trl COMMAND --help` has each command's options and an example.",
    )
    text = f"print the versions of {', '.join(_VERSIONED)}"
    parser.add_argument("--version", action=_Version, nargs=0, help=text)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, line) in COMMANDS.items():
        added = commands.add_parser(name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter)
        added.loaded = name
    for name, line in TRAININGS.items():
        commands.add_parser(name, help=line)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 after one line about bad input on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    started, trains = time.perf_counter(), argv[:1] and argv[0] in TRAININGS
    arguments = argparse.Namespace(command=argv[0]) if trains else build_parser().parse_args(argv)
    arguments.started = started
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            if trains:
                load("cli.train").launch(arguments.command, argv[1:])
            else:
                load(f"{COMMANDS[arguments.command][0]}.{arguments.command.replace('-', '_')}").run(arguments)
            return 0
        except ValueError as error:
            message = str(error)
        except OSError as error:  # a path that does not exist, is a folder, or must not be written
            message = f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
    print(f"spec-trl {arguments.command}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
