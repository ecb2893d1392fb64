"""The command line as a whole: help, examples, exit status, one line for each kind of bad input."""

import argparse
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import spec_trl_command
from spec_trl import SpeculativeConfig
from spec_trl.cli import options
from spec_trl.cli.arguments import COMMANDS
from spec_trl.cli.main import build_parser, main
from spec_trl.generation.configuration import NEED_ASSISTANT
from tests.cli.sample_run import make_profile


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


def test_options_name_what_the_library_names() -> None:
    arguments, config = build_parser().parse_args(["calibrate", "model"]), SpeculativeConfig()
    assert (arguments.quantization, arguments.kernel, arguments.lm_head) == config.packing()
    assert options.ASSISTANTS == NEED_ASSISTANT


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^ +{name}\s+\w", printed, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option_and_its_examples_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text, _, examples = capsys.readouterr().out.partition("example:\n")
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    for action in parser._actions:
        assert action.help and (action.option_strings or [action.metavar])[0] in text
    lines = [re.sub(r"\s{2,}\(.*\)$", "", line.strip()) for line in examples.splitlines() if line.strip()]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["spec-trl", name]
        build_parser().parse_args(words[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "spec-trl: error: the following arguments are required: COMMAND"),
        (["draw"], "invalid choice: 'draw'"),
        (["predict", "p.json", "--batch", "1,x"], "argument --batch: '1,x' is not a list of integers such as 1,8,32"),
        (["predict", "p.json", "--batch", "0"], "argument --batch: '0' holds a number below 1"),
        (["predict", "p.json", "--acceptance", "1.2"], "--acceptance: '1.2' is not a number from 0 to 1"),
        (["predict", "p.json", "--block-efficiency", "nan"], "'nan' is not a number above 0"),
        (["predict", "p.json", "--acceptance", "0.9", "--block-efficiency", "4"], "not allowed with argument"),
        (["plot", "p.json", "--margin", "-1"], "argument --margin: '-1' is not a number from 0 to 1"),
        (["calibrate", "model", "--max-length", "2.5"], "'2.5' is not an integer of at least 1"),
        (["calibrate", "model", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["bench", "model", "--assistant", "small"], "'small' is not KIND=MODEL with one of the kinds model, eagle3"),
        (["bench", "model", "--temperature", "-1"], "'-1' is not a number of at least 0"),
        (["report"], "the following arguments are required: RUN"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and message in captured.err and captured.err.count("\n") == 1


def test_bad_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, cut, sweep = tmp_path / "good.json", tmp_path / "cut.json", tmp_path / "sweep.csv"
    make_profile().save(good)
    cut.write_text(good.read_text()[:100])
    sweep.write_text("model,batch,length,draft_length,mode,seconds\nm,1,128,0,target,0\n")
    for arguments, message in (
        (["predict", str(tmp_path / "none.json"), "--acceptance", "0.9"], "none.json: No such file or directory"),
        (["predict", str(tmp_path), "--acceptance", "0.9"], "Is a directory"),
        (["predict", str(cut), "--acceptance", "0.9"], "cut.json is not a valid roofline profile"),
        (["validate", str(good), "--csv", str(sweep)], "line 2, column seconds: 0 must be finite and positive"),
        (["plot", str(good), "-o", str(tmp_path / "no" / "out.png")], "No such file or directory"),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1
        assert captured.err.startswith(f"spec-trl {arguments[0]}: error: ")
