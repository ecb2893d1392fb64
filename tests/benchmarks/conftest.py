"""A tiny shape that the benchmarks share, and a way to run their commands in this process."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import models
from benchmarks.measure import Result, read_result
from benchmarks.models import build, shape_config


Command = Callable[[str, str], Result]


@pytest.fixture(scope="session")
def shape() -> PreTrainedModel:
    """shape:tiny in float64, whose 4-bit copy agrees with it often, not always. No test may change it."""
    return build(shape_config("tiny"), 0.04, 0, torch.float64, "cpu")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs a benchmark by its name with arguments. The agreement of shapes is not measured again."""
    agreement = models.Agreement(0.9, 0.9, 1.0, 0.5, 512)
    monkeypatch.setattr(models, "measure_agreement", lambda *_, **__: agreement)

    def run(name: str, arguments: str) -> Result:
        module = import_module(f"benchmarks.{name}")
        output = tmp_path / "result.json"
        set_arguments(monkeypatch, module, [*arguments.split(), "--output", str(output)])
        module.main()
        text = output.read_text()
        assert str(tmp_path) not in text
        result = read_result(output)
        assert result.command.startswith(f"python -m {module.__name__} ")
        assert result.findings and all(each.what and (each.unit or each.baseline) for each in result.findings)
        return result

    return run


def set_arguments(monkeypatch: pytest.MonkeyPatch, module: ModuleType, arguments: Sequence[str]) -> None:
    """The process's arguments, as if the module ran."""
    threads = ["--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", [str(module.__file__), *arguments, *threads])
