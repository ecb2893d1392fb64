"""Prints what the stages of quarter.sh found, beside what was predicted before any GPU ran them.

    python -m benchmarks.gpu.summary [FOLDER]

FOLDER holds the stages' JSON: by default the one in which measurements are committed, with `predicted.json`, which has
the form of theirs: a number, or a pair of two for a range. Needs nothing but Python.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parents[1] / "results/gpu"
PREDICTED = "predicted.json"
SHOWN = ("tokens_per_second", "over_none", "T_p, ms", "T_q, ms", "T_V, ms", "block_efficiency", "rollout", "step")
"""Names of numbers that are listed whether they were predicted or not; sizes are too."""

Number = float | tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """One number; None: it was not predicted, or not measured."""

    stage: str
    what: str
    predicted: Number | None
    measured: float | None

    @property
    def factor(self) -> float | None:
        """Measured over predicted; over the nearer end of a range, 1 within it."""
        if self.predicted is None or self.measured is None:
            return None
        low, high = self.predicted if isinstance(self.predicted, tuple) else (self.predicted, self.predicted)
        return self.measured / min(max(self.measured, low), high)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Number]]:
    """Numbers and pairs of numbers, with the path to each."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, float(tree)
    elif isinstance(tree, list) and len(tree) == 2 and all(isinstance(end, int | float) for end in tree):
        yield path, (float(tree[0]), float(tree[1]))


def read_stages(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The stages' results by name."""
    found = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != PREDICTED)
    return {each["stage"]: each for each in found}


def figures(stages: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """All that is predicted, and what else was measured and is listed. Nothing counts but what a GPU measured."""
    found = []
    predicted = json.loads((RESULTS / PREDICTED).read_text())["stages"]
    for stage in [*predicted, *(name for name in stages if name not in predicted)]:
        result = stages.get(stage, {})
        on_gpu = result if result.get("machine", {}).get("accelerator") else {}
        taken = {path: value for path, value in leaves(on_gpu) if isinstance(value, float)}
        expected = dict(leaves(predicted.get(stage, {})))
        also = [path for path in taken if path[0] == "measured" and (path[-1] in SHOWN or path[-1].endswith(", GB"))]
        for path in dict.fromkeys([*expected, *also]):
            what = ", ".join(path[path[0] == "measured" :])
            found.append(Figure(stage, what, expected.get(path), taken.get(path)))
    return found


def table(rows: Sequence[Figure]) -> str:
    """The figures in Markdown."""
    lines = ["| stage | what | predicted | measured | factor |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (_text(row.predicted), _text(row.measured), "–" if row.factor is None else f"{row.factor:.2f}")
        lines.append(f"| {row.stage} | {row.what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def other_cards(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """A line that says so where another card measured than the one of the predictions; else nothing."""
    card = json.loads((RESULTS / PREDICTED).read_text())["card"]
    found = {each.get("machine", {}).get("accelerator") for each in stages.values()} - {None, card}
    return f"Predictions are for {card}; measured on {', '.join(sorted(found))}.\n\n" if found else ""


def _text(value: Number | None) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(_text, value))
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    stages = read_stages(Path(given[0]) if given else RESULTS)
    print(other_cards(stages) + table(figures(stages)))
    for name, stage in stages.items():
        where = stage.get("machine", {}).get("accelerator") or "no GPU known: its numbers are not listed"
        left_out = f"; left out: {', '.join(stage['skipped'])}" if stage.get("skipped") else ""
        failed = ", ".join(stage["failed"]) or "nothing"
        print(f"{name}: {stage['status']}, {stage['seconds']:.0f} s, {where}; failed: {failed}{left_out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
