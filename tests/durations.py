"""Seconds that each file of tests takes, for an even split over processes: `python -m tests.durations REPORT` writes
`durations.json` from the output of `pytest --durations=0` on an idle machine (`make durations`)."""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path


FILE = Path(__file__).with_suffix(".json")
LINE = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(tests/\S+?\.py)::", re.MULTILINE)


def read(report: str) -> dict[str, float]:
    """Seconds by file, from what pytest printed."""
    seconds: dict[str, float] = defaultdict(float)
    for took, file in LINE.findall(report):
        seconds[file] += float(took)
    return {file: round(took, 1) for file, took in sorted(seconds.items())}


def order(file: str, known: dict[str, float]) -> tuple[float, str]:
    """Sorts files of which nothing is known before all others, and these by seconds, the longest first."""
    return -known.get(file, float("inf")), file


if __name__ == "__main__":
    if not (found := read(Path(sys.argv[1]).read_text())):
        sys.exit(f"{sys.argv[1]} holds no line of pytest --durations=0")
    FILE.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} files, {sum(found.values()):.0f} s")
