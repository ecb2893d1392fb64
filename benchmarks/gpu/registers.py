"""Registers, spilled bytes and shared memory of every Triton kernel, compiled ahead of time for GPUs that need not be
there: by the tests of machine code, which launch each kernel at the shapes of 0.5, 1.5 and 7 B models. It fails where
one spills registers, takes more shared memory than a program may, or is compiled by no test.

    python -m benchmarks.gpu.registers
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Finding, Options, begin, shown, write_result
from tests.generation.engine.cuda.kernels.ahead_of_time import TOLD_TO


ROOT = Path(__file__).parents[2]
SHARED = {80: 163, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may take, by ten times the compute capability (CUDA's programming guide)."""


def launched(package: Path) -> set[str]:
    """Names of the kernels that the sources of `package` launch."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kernels = {
            each.name
            for each in tree.body
            if isinstance(each, ast.FunctionDef) and any("triton.jit" in ast.unparse(by) for by in each.decorator_list)
        }
        for each in ast.walk(tree):  # kernel[grid](...)
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Subscript):
                found |= kernels & {ast.unparse(each.func.value)}
    return found


def faults(rows: Sequence[Sequence], kernels: set[str]) -> list[str]:
    """What is wrong with rows of capability, name, shared bytes, spilled bytes, registers and variant."""
    missing = kernels - {name for _, name, *_ in rows}
    wrong = [f"no test compiles {name}" for name in sorted(missing)]
    for capability, name, shared, spilled, _, variant in rows:
        where = f"{name} ({variant}) for {capability / 10}"
        if spilled:
            wrong.append(f"{where} spills {spilled} bytes")
        if shared > SHARED[capability] << 10:
            wrong.append(f"{where} takes {shared} bytes of shared memory")
    return wrong


def table(rows: Sequence[Sequence]) -> dict[str, dict[str, str]]:
    """By kernel and variant, by capability: the most of its specialisations on strides and sizes."""
    most: dict[tuple[str, int], tuple[int, ...]] = {}
    for capability, name, shared, spilled, registers, variant in rows:
        key, numbers = (f"{name}: {variant}", capability), (registers, spilled, shared)
        most[key] = tuple(map(max, most.get(key, numbers), numbers))
    lines: dict[str, dict[str, str]] = {}
    for (kernel, capability), (registers, spilled, shared) in sorted(most.items()):
        text = f"{registers} registers, {spilled} B spilled, {shared / 1024:.1f} of {SHARED[capability]} KiB shared"
        lines.setdefault(kernel, {})[f"{capability / 10}"] = text
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "registers", "--only 'fused_layer and machine_code and 90'")
    parser.add_argument(
        "--only", default="machine_code and not 120", help="expression of pytest that chooses the tests; all but 12.0"
    )
    options = parser.read(arguments)
    machine = begin(options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", options.only, "--override-ini", "addopts="]
        command += ["tests/generation/engine/kernels", "tests/quantization/kernels"]
        ran = subprocess.run(command, cwd=ROOT, env=os.environ | {TOLD_TO: str(file)}, stdout=sys.stderr)
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = [row for _, *row in lines]
    wrong = faults(rows, launched(ROOT / "spec_trl"))
    if ran.returncode:
        wrong.insert(0, "tests of machine code fail")
    if not rows:
        raise SystemExit("\n".join(wrong))
    by_kernel, version = table(rows), lines[0][0]
    findings = []
    for capability in sorted({row[0] for row in rows}):
        own = [row for row in rows if row[0] == capability]
        for what, at, unit in (("spilled", 3, "B"), ("registers of a thread", 4, ""), ("shared memory", 2, "KiB")):
            value = max(row[at] for row in own) / (1024 if unit == "KiB" else 1)
            findings.append(Finding(f"{capability / 10}: most {what}", value, unit))
    write_result(
        options.output, "registers", "Registers, spills and shared memory of the Triton kernels",
        f"{len(by_kernel)} variants of {len({row[1] for row in rows})} kernels, compiled by Triton {version} and its "
        "ptxas without a GPU; the most over specialisations of a variant.",
        {**machine, "triton": version}, None, findings, {"options": shown(options), "kernels": by_kernel},
    )  # fmt: skip
    if wrong and not options.tiny:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
