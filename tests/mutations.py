"""Breaks the code in one place at a time and looks whether `make test` notices: `python -m tests.mutations`.

The places are listed in `mutations.toml`. Each is broken in a copy of the repository: first the tests of its own room
run there, then, if these pass, all tests of `make test`. The command fails when a mutation slips through, or when its
text is no longer in the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*_output", ".*_cache")
SECONDS = 900  # for one run of the tests: a mutation that hangs counts as noticed


@dataclass(frozen=True)
class Mutation:
    """One broken place.

    Args:
        file: below `spec_trl/`.
        old: text that stands in the file exactly once.
        new: what takes its place.
        tests: that should notice, below `tests/`; they run first.
    """

    file: str
    old: str
    new: str
    tests: str


def places() -> list[Mutation]:
    """All that are listed."""
    listed = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text())["mutation"]
    return [Mutation(**place) for place in listed]


def main() -> None:
    """Runs the mutations, or those that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="run those whose file or old text contains TEXT")
    wanted = parser.parse_args().only
    chosen = [place for place in places() if wanted in place.file + place.old]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / ROOT.name, ignore=LEFT_OUT))
        if not wanted and not _pass("tests", copy):
            sys.exit("The tests fail without any mutation: mend them first.")
        noticed = sum([_is_noticed(mutation, copy) for mutation in chosen])
    print(f"{noticed} of {len(chosen)} mutations were noticed.")
    sys.exit(noticed < len(chosen))


def _is_noticed(mutation: Mutation, copy: Path) -> bool:
    path = copy / "spec_trl" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        print(f"STALE    {mutation.file}: {mutation.old!r} stands there {text.count(mutation.old)} times", flush=True)
        return False
    started = time.monotonic()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        by = next((tests for tests in (f"tests/{mutation.tests}", "tests") if not _pass(tests, copy)), None)
    finally:
        path.write_text(text)
    verdict = f"noticed by {by}" if by else "SLIPPED THROUGH"
    seconds = time.monotonic() - started
    print(f"{verdict:50} {seconds:4.0f} s  {mutation.file}: {mutation.old!r} -> {mutation.new!r}", flush=True)
    return by is not None


def _pass(tests: str, copy: Path) -> bool:
    options = ["-q", "-x", "-m", "not slow", "-n", "2", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


if __name__ == "__main__":
    main()
