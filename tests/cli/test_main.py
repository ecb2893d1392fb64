"""The command line as a whole: the script, help and its examples."""

import argparse
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import spec_trl_command
from spec_trl.cli.main import COMMANDS, build_parser, main
from spec_trl.papers import load


def test_the_script_is_declared() -> None:
    content = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, function = content["project"]["scripts"]["spec-trl"].split(":")
    assert getattr(sys.modules[module], function) is spec_trl_command.main
    assert module in content["tool"]["setuptools"]["py-modules"]


def test_the_script_runs_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["spec-trl", "predict", str(tmp_path / "none.json"), "--acceptance", "0.9"])
    assert spec_trl_command.main() == 2
    assert "No such file or directory" in capsys.readouterr().err


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_command_and_option_and_its_examples_parse(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(rf"^ +{name}\s+\w", help_of(capsys), re.MULTILINE)
    text, _, examples = help_of(capsys, name).partition("example:\n")
    parser = argparse.ArgumentParser()
    load(f"{COMMANDS[name][0]}.arguments").COMMANDS[name].add_arguments(parser)
    for action in parser._actions:
        assert action.help and (action.option_strings or [action.metavar])[0] in text
    lines = [re.sub(r"\s{2,}\(.*\)$", "", line.strip()) for line in examples.splitlines() if line.strip()]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["spec-trl", name]
        build_parser().parse_args(words[1:])


def test_the_version_names_what_matters_and_imports_none_of_it() -> None:
    code = (
        "import sys, spec_trl_command; sys.argv = ['spec-trl', '--version']\n"
        "try: spec_trl_command.main()\n"
        "except SystemExit as stop: print(stop.code, sorted({'torch', 'transformers', 'trl'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    assert last == "0 []"
    assert first.endswith(f"transformers {metadata.version('transformers')}, torch {metadata.version('torch')}, "
                          f"trl {metadata.version('trl')}")  # fmt: skip
    assert first.startswith("spec_trl ")
