"""Runs `spec-trl grpo` and `spec-trl rloo`: TRL's training scripts with our trainers and configs.

A YAML file of `trl grpo` works unchanged. As there, `accelerate launch` starts the processes, with the options that
neither the script nor the config knows, such as `--num_processes` and `--accelerate_config`. Each process runs this
module.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any
from unittest.mock import patch

import trl
import yaml  # type: ignore[import-untyped]
from accelerate.commands.launch import launch_command, launch_command_parser
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.cli.commands.training import _subtract_subsequence

from ..trainers.trainers import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOConfig, SpecRLOOTrainer


CLASSES: dict[str, tuple[Any, Any]] = {
    "grpo": (SpecGRPOConfig, SpecGRPOTrainer),
    "rloo": (SpecRLOOConfig, SpecRLOOTrainer),
}


def launch(name: str, argv: Sequence[str]) -> None:
    """Starts the processes of a training.

    Args:
        argv: options of the script, of its config, of ours and of `accelerate launch`, and `--config FILE`.

    Raises:
        ValueError: an option is unknown, or a value is refused.
    """
    if argv and not argv[0].startswith("-"):
        raise ValueError(f"{argv[0]!r} follows no option; give a YAML file as --config {argv[0]}.")
    if (count := list(argv).count("--config")) > 1 or argv[-1:] == ["--config"]:
        raise ValueError(f"--config takes one YAML file, and is given {count} times; write --config FILE once.")
    parser, launcher = _parser(name), launch_command_parser()
    try:
        *_, of_file, of_line = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a key is no text
        raise ValueError(f"--config names a file that is no YAML of options: {error}") from error
    options = resolve_accelerate_config_argument(of_file + of_line)
    for option in options:
        flag = option.partition("=")[0]
        if flag.startswith("--") and flag not in launcher._option_string_actions:
            config, known = CLASSES[name][0], [action.dest for action in (*parser._actions, *launcher._actions)]
            remedy = config.remedy(flag[2:], known)
            raise ValueError(f"{flag} is no option of TRL's script, {config.__name__} or accelerate. {remedy}")
    own = _subtract_subsequence(list(argv), of_line)
    launch_command(launcher.parse_args([*options, "--module", __name__, name, *own]))


def train(name: str, argv: Sequence[str]) -> None:
    """Runs the script in one of the processes."""
    parsed = _parser(name).parse_args_and_config(argv, fail_with_unknown_args=False)
    with patch.object(trl, f"{name.upper()}Trainer", CLASSES[name][1]):
        _script(name).main(*parsed)


def _script(name: str) -> Any:
    return import_module(f"trl.scripts.{name}")


def _parser(name: str) -> Any:
    kinds = getattr(_script(name), f"{name.upper()}ScriptArguments"), CLASSES[name][0]
    return trl.TrlParser((*kinds, trl.ModelConfig, trl.DatasetMixtureConfig), prog=f"spec-trl {name}")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2:])
