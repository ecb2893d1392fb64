"""The benchmark of first calls: what it prepares and reports. No test looks at a time."""

import json
import sys
from pathlib import Path

import pytest

import spec_trl
from benchmarks import first_call


def test_each_first_call_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is released before it, and nothing before the second call."""
    calls: list[str] = []
    monkeypatch.setattr(first_call, "rate", lambda model, work, way, seed: float(calls.append(way) is None))
    monkeypatch.setattr(spec_trl, "release", lambda model: calls.append("release"))
    output = tmp_path / "first_call.json"
    options = "--models shape:tiny,float32 --batch 1 --repeats 2 --new-tokens 4 --strategies self ngram"
    monkeypatch.setattr(sys, "argv", ["first_call", *options.split(), "--output", str(output)])
    monkeypatch.setenv("SPEC_TRL_CACHE", "")
    first_call.main()
    once = ["release", "generate", "release", "none", "release", "self", "self", "release", "ngram", "ngram"]
    assert calls == ["generate", "none", *once, *once[2:], *once[:2]]
    (cell,) = json.loads(output.read_text())["cells"]
    assert cell["ratios"]["self, second call"] == {"generate": 1.0, "none": 1.0}
    assert "| shape:tiny, float32 | 1 | ngram | 1.00× | 1.00× |" in output.with_suffix(".md").read_text()


def test_bad_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["first_call", "--batch", "0"])
    with pytest.raises(SystemExit):
        first_call.parse_arguments()
    assert "must be 1 or more" in capsys.readouterr().err
