"""Result files and what is made of them: each can be read, the page is that of the files, docs name what exists."""

import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import measure, results_page
from benchmarks.chat_tables import (
    MODEL,
    README_ROWS,
    TABLES,
    performance_table,
    readme_table,
    usable,
    with_table,
)
from benchmarks.measure import RESULTS, Finding, Result, read_result, write_result
from spec_trl import SpecGRPOConfig


ROOT = Path(__file__).parents[2]
FIELDS = {field.name for field in dataclasses.fields(SpecGRPOConfig)} | {"rollout_func", "rollout_log"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "spec_trl").rglob("*.md"))]


def test_the_page_is_made_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    """A result that no row needs is gone, and the page stays short."""
    results = results_page.read_results()
    assert results.keys() <= results_page.CLAIMS.keys()
    text = results_page.page(results)
    assert results_page.PAGE.read_text(encoding="utf-8") == text and len(text.splitlines()) <= 150
    for name, result in results.items():
        assert list(results_page.rows(name, result)), name
        claims = text.partition("## Left out")[0]
        assert (f"\n| `{name}` |" in claims) != (f"\n* `{name}`: {result.refusal()}\n" in text), name
        module = result.command.split()[2].replace(".", "/")
        assert (ROOT / module).with_suffix(".py").exists(), result.command
    results_page.main(["rivals"])
    assert results["rivals"].setup in capsys.readouterr().out
    with pytest.raises(SystemExit, match="nothing: no such result; choose among"):
        results_page.main(["nothing"])


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_tables_about_a_chat_model_are_made_of_the_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_table(text, TABLES[page](results_page.read_results())) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_name_what_exists(page: Path) -> None:
    """Links, modules, result files and commands."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (page.parent / target).exists(), target
    for module in re.findall(r"(?:spec_trl|benchmarks|examples)(?:/[a-z0-9_]+)+\.(?:py|sh)", text):
        assert (ROOT / module).exists(), module
    for module in re.findall(r"(?:from|python -m) ((?:spec_trl|benchmarks)(?:\.[a-z0-9_]+)+)", text):
        place = ROOT / module.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").exists(), module
    left_out = {line for line in text.splitlines() if "as the rules for a claim ask" in line}
    text = "\n".join(line for line in text.splitlines() if line not in left_out)
    names = set(re.findall(r"`([a-z]+_[A-Za-z0-9_]+|states|specactor)`", text)) & results_page.CLAIMS.keys()
    assert names <= usable(results_page.read_results()).keys() | FIELDS, "a number of a result that is left out"
    for name in re.findall(r"`((?:rollout|never_slower|tts|end_to_end|identity|rtn)_[A-Za-z0-9_]+)`", text):
        assert name in FIELDS or (RESULTS / f"{name}.json").exists(), name


def result_of(repeats: int | None, load: float, commit: str | None, *findings: Finding) -> Result:
    machine = {"cpu": "AMD EPYC", "cpu_capability": "AVX512 avx512_bf16", "cores": 2, "threads": 2}
    machine |= {"load_average_1min": load, "date": "2026-01-02T03:04:05+00:00"}
    options = {"options": {"strategies": ["none", "auto"]}}
    command = "python -m benchmarks.rollout"
    return Result("rollouts", "A", "So.", command, commit, repeats, machine, [*findings], options)


@pytest.mark.parametrize(
    ("repeats", "load", "commit", "reason"),
    [
        (3, 2.0, "abc1234", ""),
        (2, 2.0, "abc1234", "repeats: 2, fewer than 3"),
        (3, 2.04, "abc1234", "load at its start: 2.04, above its threads, 2"),
        (1, 9.0, None, "repeats: 1, fewer than 3; load at its start: 9.00, above its threads, 2; no commit"),
        (None, 9.0, "abc1234", ""),  # no clock decides it
        (None, 9.0, None, "no commit"),
    ],
)
def test_a_result_that_may_not_be_claimed_is_left_out(
    repeats: int | None, load: float, commit: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {name: 1.5 + at for at, (_, _, name) in enumerate(README_ROWS[:2])}
    found = [
        Finding(f"{MODEL}, float32, batch 1: {name}", value, "×", "transformers generate")
        for name, value in values.items()
    ]
    result = result_of(repeats, load, commit, *found)
    results = {"rollout_chat": result}
    assert result.refusal() == reason
    page = results_page.page(results)
    assert ("batch 1: ours none | 1.50× |" in page) == (not reason) == (f"* `rollout_chat`: {reason}\n" not in page)
    assert "* `rollout_chat_bfloat16`: not measured\n" in page
    machine = "AMD EPYC with AVX512 avx512_bf16, 2 threads, 2026-01"
    for make, row in ((readme_table, "the engine alone, float32"), (performance_table, '`"none"`, float32')):
        table = make(results)
        assert (f"{row} | 1.50 | – | – | – |" in table) == (machine in table) == (not reason), table
        missing = next(line for line in table.splitlines() if "as the rules for a claim ask" in line)
        assert "`rollout_chat_many`" in missing and ("`rollout_chat`" in missing.split("Not")[1]) == bool(reason)
    assert ("**In float32 the engine alone writes 1.5 to 1.5 times" in readme_table(results)) == (not reason)


def test_a_result_is_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/here/benchmarks/paper/rollout.py", "--models", "/there/a", "shape:/there/b"])
    monkeypatch.setattr(measure, "commit", lambda: "abc1234")
    machine: dict[str, object] = {"cpu": "a CPU", "cores": 2, "threads": 1, "accelerator": None, "torch": "2"}
    machine |= {"transformers": "5", "load_average_1min": 0.5, "date": "2026-01-02T03:04:05+00:00"}
    found = [Finding("a, batch 1", 1.5, "×", "b", (1.25, 2.0)), Finding("c", None, "s")]
    write_result(tmp_path / "x.json", "tts", "A title", "So it was.", machine, 2, found, {"of": {1: float("nan")}})
    wanted = Result(
        "tts", "A title", "So it was.", "python -m benchmarks.paper.rollout --models a shape:b", "abc1234",
        2, machine, found, {"of": {"1": None}},
    )  # fmt: skip
    assert read_result(tmp_path / "x.json") == wanted
    printed = capsys.readouterr().out
    assert "| a, batch 1 | 1.50× | 1.25× to 2.00× | b |" in printed
    assert printed.endswith("results_page will leave it out: repeats: 2, fewer than 3\n")
    (tmp_path / "y.json").write_text(json.dumps({"theme": "tts"}))
    with pytest.raises(ValueError, match="y.json is not a valid result of a benchmark: title.*run its command again"):
        read_result(tmp_path / "y.json")


@pytest.mark.parametrize(
    ("command_line", "message"),
    [
        ("rollout --strategies model", "strategy model needs --assistant"),
        ("rollout --strategies ngram --verification rejection", "ngram has no draft probabilities"),
        ("rollout --batch 4 0", "--batch [4, 0] must be 1 or more"),
        ("one_token --calls 1", "--calls 1 must be 2 or more"),
        ("control_machine --models nowhere,float32", "--models nowhere: no such folder"),
        ("control_machine --models shape:tiny", "name a dtype after a comma"),
        ("end_to_end --steps 1", "the first step is not timed"),
        ("end_to_end --questions q.jsonl", "--questions q.jsonl: name a .jsonl"),
        ("end_to_end --learned ngram .", "--learned ngram .: give eagle3 or dflash"),
        ("tts drafters --learning-rates 0", "must be above 0"),
    ],
)
def test_wrong_options_are_named(command_line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = command_line.split()
    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{name}").main(arguments)
    assert message in capsys.readouterr().err
