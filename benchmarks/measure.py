"""What every benchmark needs: options, clock, the machine, and the file of the result."""

import argparse
import datetime
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from spec_trl.hardware import instruction_set, processor_name
from spec_trl.json_files import read_json, write_json


RESULTS = Path(__file__).parent / "results"
TINY_RESULTS = Path("bench_output/tiny")
FEWEST_REPEATS = 3
"""Timed repeats below which no spread can be seen: a result of fewer is not claimed."""


@dataclass
class Gauge:
    """Seconds, filled in when the `with` block that gave it ends."""

    value: float = 0.0


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Gauge]:
    """Wall-clock seconds of the block, the device's queued work included."""
    gauge = Gauge()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    yield gauge
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gauge.value = time.perf_counter() - started


def times_in_turns(works: Mapping[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Medians of what `works` return, run in turns after one that warms up."""
    found = [{name: work() for name, work in works.items()} for _ in range(turns + 1)][1:]
    return {name: statistics.median(turn[name] for turn in found) for name in works}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, accelerator, threads, versions and date, as plain data for a result file."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "cpu_capability": instruction_set(),
        "load_average_1min": os.getloadavg()[0],  # above `threads`: others were running too
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: Mapping[str, object]) -> str:
    """`describe_machine` in one line."""
    where = machine["accelerator"] or f"{machine['cpu']} ({machine['cores']} cores)"
    capability = f", {machine['cpu_capability']}" if "cpu_capability" in machine else ""
    return (
        f"{where}{capability}, {machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, load average at start {machine['load_average_1min']:.1f}, "
        f"{str(machine['date'])[:10]}"
    )


# ---- the command line ----------------------------------------------------------------------------------------------


class Options(argparse.ArgumentParser):
    """The command line of a benchmark: what each has, and what it adds with `add_argument`.

    Args:
        description: for `--help`.
        result: name of the result's file.
        tiny: what `--tiny` stands for: the smallest input, which tries the code out.
    """

    def __init__(self, description: str | None, result: str, tiny: str) -> None:
        super().__init__(description=description, formatter_class=_Help)
        self._result, self._tiny = result, tiny
        add, device = self.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
        add("--device", default=device, choices=["cpu", "cuda"], help="of the model")
        add("--threads", type=int, default=torch.get_num_threads(), help="of torch")
        add("--seed", type=int, default=0, help="of weights, prompts and sampling")
        add("--output", type=Path, default=RESULTS / f"{result}.json", help="file of the result")
        add("--tiny", action="store_true", help=f"try it out: {tiny.replace('%', '%%')}")

    def read(self, arguments: Sequence[str] | None, *counts: str) -> argparse.Namespace:
        """The options; `arguments` None: the process's. Those called `counts`, numbers or lists, must be 1 or more."""
        given = list(sys.argv[1:] if arguments is None else arguments)
        if "--tiny" in given:
            given = ["--output", str(TINY_RESULTS / f"{self._result}.json"), *shlex.split(self._tiny), *given]
        options = self.parse_args(given)
        self.at_least(1, options, *counts)
        return options

    def at_least(self, low: int, options: argparse.Namespace, *names: str) -> None:
        """Ends with an error that names an option below `low`."""
        for name in names:
            value = getattr(options, name)
            if min(value, default=low) < low if isinstance(value, list) else value is not None and value < low:
                self.error(f"--{name.replace('_', '-')} {value} must be {low} or more")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def begin(options: argparse.Namespace) -> dict[str, object]:
    """Sets the threads, quiets a warning that says nothing here, and describes the machine."""
    torch.set_num_threads(options.threads)
    # transformers warns that a story model's own limit on the length yields to max_new_tokens.
    warnings.filterwarnings("ignore", message=".*max_new_tokens.*")
    machine = describe_machine(torch.device(options.device))
    if machine["load_average_1min"] > options.threads:
        load = f"load {machine['load_average_1min']:.2f} is above --threads {options.threads}"
        print(f"{load}: a result that a clock decides will be left out; wait for others to end", file=sys.stderr)
    return machine


@contextmanager
def fresh_cache() -> Iterator[None]:
    """The package's cache is empty in this block: nothing of an earlier run is read."""
    before = os.environ.get("SPEC_TRL_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPEC_TRL_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("SPEC_TRL_CACHE")
            os.environ |= {} if before is None else {"SPEC_TRL_CACHE": before}


def shown(options: argparse.Namespace, *hidden: str) -> dict[str, object]:
    """What a result says of the options: of paths the last part alone, and nothing of `hidden`."""
    hidden = ("output", "tiny", *hidden)
    return {name: _without_folder(value) for name, value in vars(options).items() if name not in hidden}


def _without_folder(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folder(each) for each in value]
    if isinstance(value, Path):
        return value.name
    path = re.fullmatch("(shape:)?/.+", value) if isinstance(value, str) else None
    return value if path is None else (path[1] or "") + Path(value).name


# ---- the file of the result ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One number that a benchmark found."""

    what: str  # was measured, with model, batch and whatever else decides it
    value: float | None  # None where it does not apply
    unit: str  # "×" of a ratio, "%" of a share, "±%" of a change, else a word or a symbol
    baseline: str = ""  # of a ratio or a change
    interval: tuple[float, float] | None = None  # the lowest and the highest repeat, or 95 %: `setup` says which


@dataclass(frozen=True)
class Result:
    """One result file."""

    theme: str  # what kind of question it answers
    title: str
    setup: str  # how it was measured
    command: str  # that made it; absolute paths without their folders
    commit: str | None  # of the code; None: not recorded
    repeats: int | None  # timed ones, of each way; None: no clock decides a finding, so load does not either
    machine: dict[str, Any]  # as of :func:`describe_machine`
    findings: list[Finding]  # the numbers that count
    details: dict[str, Any]  # options, and everything else that was measured and is not bulk

    def refusal(self) -> str:
        """Why nothing may be claimed of it; empty if it may."""
        load, threads, why = self.machine["load_average_1min"], self.machine["threads"], []
        if self.repeats is not None and self.repeats < FEWEST_REPEATS:
            why.append(f"repeats: {self.repeats}, fewer than {FEWEST_REPEATS}")
        if self.repeats is not None and load > threads:
            why.append(f"load at its start: {load:.2f}, above its threads, {threads}")
        if self.commit is None:
            why.append("no commit")
        return "; ".join(why)


def read_result(path: Path) -> Result:
    """The result in `path`.

    Raises:
        ValueError: the file is no result.
    """
    return read_json(path, Result, "result of a benchmark", "run its command again")


def write_result(
    output: Path, theme: str, title: str, setup: str, machine: Mapping[str, Any], repeats: int | None,
    findings: Sequence[Finding], details: Mapping[str, Any],
) -> None:  # fmt: skip
    """Writes a result, with the command of this process and the commit, and prints it."""
    result = Result(
        theme, title, setup, command_line(), commit(), repeats, dict(machine), list(findings), dict(details)
    )
    write_json(output, result)
    why = result.refusal()
    print(f"{text_of(result)}\n\nwritten: {output}" + f"\nresults_page will leave it out: {why}" * bool(why))


def text_of(result: Result) -> str:
    """A result for a reader."""
    parts = result.title, f"`{result.command}` ({result.commit or 'no commit'})", machine_line(result.machine)
    return "\n\n".join([*parts, result.setup, findings_table(result.findings)])


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest, as of a finding's interval."""
    return min(values), max(values)


def command_line() -> str:
    """The command of this process; absolute paths, which are one machine's own, without their folders."""
    module = sys.argv[0].removesuffix(".py").rpartition("/benchmarks/")[2].replace("/", ".")
    return shlex.join(["python", "-m", f"benchmarks.{module}", *map(_without_folder, sys.argv[1:])])


def commit() -> str | None:
    """The commit that is checked out, with "+" where files differ from it; None outside of a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() + "+" * (changed.returncode != 0)


def findings_table(findings: Sequence[Finding]) -> str:
    """Findings as a Markdown table, without the columns that are empty."""
    header = ["what", "value", "interval", "baseline"]
    rows = [[each.what, number(each.value, each.unit), interval_text(each), each.baseline] for each in findings]
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = [[row[i] for i in kept] for row in (header, ["---"] * len(header), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, unit: str = "") -> str:
    """A number for a reader: 1.74×, +3.1 %, 0.0042 s; a dash for None."""
    if value is None:
        return "–"
    if unit == "×":
        return f"{value:.3f}×" if 0.9 < value < 1.1 else f"{value:.2f}×"
    if unit in ("%", "±%"):
        return f"{100 * value:.1f} %" if unit == "%" else f"{100 * value:+.1f} %"
    digits = f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def interval_text(finding: Finding) -> str:
    """"1.2× to 1.4×"; empty without an interval."""
    if finding.interval is None:
        return ""
    low, high = (number(value, finding.unit) for value in finding.interval)
    return f"{low} to {high}"
