"""Whether what the kernels compute is right: tests that need a GPU, the kernels' other tests, and compute-sanitizer.

What a command that reaches its limit had found by then is kept. What the commands print is in `checks_GROUP.txt`;
pytest's list of failed tests is kept between runs, for `--last-failed`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .part import Part


GROUPS = ("cuda", "kernels", "sanitizer")
KERNELS = ("tests/generation/engine/kernels", "tests/quantization/kernels")
SMOKE = "tests/quantization/kernels/test_kernel_times.py"  # takes a second
PROCESSES = 10  # at most, of the kernels' tests: each compiles on a core, and takes half a GB of the GPU
SANITIZED = {  # by tool: tests that capture nothing, a few of each kernel; the sanitizer is 10 to 50 times slower
    "memcheck": (
        ["test_multiplies_like_the_reference and triton", "tests/quantization/kernels/test_on_gpu.py"],
        ["test_pages or test_half_precision", "tests/generation/engine/kernels/test_ragged_attention.py"],
        ["test_is_right", "tests/generation/engine/kernels/test_dense_product.py"],
        ["test_norms or test_silu or test_rotates", "tests/generation/engine/kernels/test_fused_layer.py"],
        ["test_rows_that_are_broken or test_of_equals", "tests/generation/engine/kernels/test_sampling.py"],
    ),
    "racecheck": (["test_division_of_the_columns", "tests/quantization/kernels/test_triton_int4.py"],),
}
FOUND = 86
"""Exit status of compute-sanitizer where it found anything; pytest has none above 5."""
NO_TEST, OUT_OF_TIME = 5, (124, -9)  # exit status of pytest; of timeout: interrupted; killed, and itself with it
# As pytest says it of each test, and again in its summary, which it does not write when it is killed.
FAILED = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:FAILED|ERROR) (.+?)(?: - .*)?$|^(tests/.+?) (?:FAILED|ERROR) +\[ *\d+%\]$",
    re.MULTILINE,
)
LAST_SECONDS, END_LINES = 5, 60  # for an interrupted command to say what it had; of its output, in the JSON


def of_a_gpu(root: Path = Path()) -> list[str]:
    """Files with tests that need a GPU, below `root`: to import all others would take longer than these tests."""
    files = (root / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(root)) for path in files if "pytest.mark.cuda" in path.read_text())


def pytest_command(part: Part, *more: str) -> list[str]:
    """With a line for each test as it ends."""
    kept = f"cache_dir={(part.folder / 'cache' / f'pytest_{part.group}').absolute()}"
    return [sys.executable, "-m", "pytest", "-v", "-o", kept, "--continue-on-collection-errors", *more]


def commands(part: Part) -> Iterator[tuple[str, list[str]]]:
    """The group's commands by name."""
    if part.group == "cuda":  # one after the other: they look at the device's memory
        yield "tests that need a GPU", pytest_command(part, "-m", "cuda", *of_a_gpu())
    elif part.group == "kernels":
        several = importlib.util.find_spec("xdist") is not None and not part.is_smoke
        parallel = ["-n", str(min(PROCESSES, os.cpu_count() or 1))] if several else []
        files = [SMOKE] if part.is_smoke else KERNELS
        yield "tests of kernels", pytest_command(part, *parallel, "-m", "not slow and not cuda", *files)
    elif part.device.type != "cuda":
        part.skip("compute-sanitizer", "needs a GPU")
    elif shutil.which("compute-sanitizer") is None:
        part.skip("compute-sanitizer", "is not installed")
    else:
        for tool, tests in SANITIZED.items():
            sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
            for chosen, file in tests:
                name = f"{tool}, {Path(file).stem}"
                yield name, [*sanitizer, *pytest_command(part, "-m", "not slow", "-k", chosen, file)]


def run(part: Part, command: Sequence[str]) -> dict[str, Any]:
    """Runs one command for as long as the part has, and reads what it printed."""
    seconds = max(part.seconds_left - LAST_SECONDS, 1.0)
    # timeout interrupts the command with all that it started.
    limited = ["timeout", "-s", "INT", "-k", str(LAST_SECONDS), f"{seconds:.0f}", *command]
    # The sanitizer would not see a write past a tensor's end into what the allocator keeps.
    more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if part.group == "sanitizer" else {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(limited, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with (part.folder / f"{part.name}.txt").open("a") as log:
        log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    return outcome(done.returncode, done.stdout)


def outcome(rc: int, text: str) -> dict[str, Any]:
    """What pytest said, or compute-sanitizer around it; `state` is "passed", "failed", "out of time" or "no test"."""
    failed = list(dict.fromkeys(found[1] or found[2] for found in FAILED.finditer(text)))
    ends = re.findall(r"^.*\b\d+ [a-z]+.* in [\d.]+s.*$", text, re.MULTILINE)
    pairs = re.findall(r"(\d+) (passed|failed|skipped)", ends[-1] if ends else "")
    counts = {kind: int(count) for count, kind in pairs}
    if failed or rc not in (0, NO_TEST, *OUT_OF_TIME):
        state = "failed"
    elif rc in OUT_OF_TIME:
        state = "out of time"
    else:
        state = "passed" if counts.get("passed") else "no test"
    return {"state": state, "rc": rc, "counts": counts, "failed": failed, "end": text.splitlines()[-END_LINES:]}


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("checks", __doc__, arguments, groups=GROUPS)
    (part.folder / f"{part.name}.txt").unlink(missing_ok=True)
    failed = 0
    for name, command in commands(part):
        found = part.measure(name, partial(run, part, command), needs=10.0)
        if found is not None and found["state"] == "failed":
            failed = 1
            print(*(found["failed"] or found["end"]), sep="\n", file=sys.stderr)
    return part.finish() or failed


if __name__ == "__main__":
    raise SystemExit(main())
