"""What the stages of the GPU benchmark share: their command line, their clock, and the JSON that each of them writes.

A stage may be killed at any time, so its JSON is written anew after every measurement. What fails is recorded with its
error and the stage goes on: a baseline that cannot run is named, not dropped.
"""

import importlib.metadata
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import transformers

from benchmarks.measure import Options, describe_machine
from spec_trl.json_files import write_atomically

from .shapes import CONFIGS, DEFAULT, TINY


# cuDNN plans its masked attention anew for each length, and every step has another: no method shall pay for that.
# torch reads this when it first attends.
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")

T = TypeVar("T")
LONGEST_ERROR = 1500  # characters
PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "numpy", "tokenizers", "peft", "flash-attn")


def versions() -> dict[str, str]:
    """Of installed packages that decide what is measured: of two that are installed, the one that is imported."""
    first = {own.name: own.version for own in reversed([*importlib.metadata.distributions()])}
    return {name: first[name] for name in PACKAGES if name in first}


class Stage:
    """One of `stages` of the benchmark: its command line (`arguments`; None: the process's) and its result,
    `STAGE.json`.

    Attributes:
        name: of the stage.
        device, shape, seed: what to measure on and with; `is_smoke`: the tiny shape, to try the code out.
        found, errors, skipped: what was measured so far, and why what was not, by key.
        shared: what measurements keep for later ones; it is not written.
    """

    def __init__(
        self, description: str | None, stages: Sequence[str], arguments: Sequence[str] | None = None
    ) -> None:
        # Importing torch and transformers takes seconds of a stage's time too.
        self._started = psutil.Process().create_time()
        parser = Options(description, "", f"--device cpu --shape {TINY} --output bench_output/gpu")
        parser.set_defaults(device="cuda", output=Path("bench_output/gpu"))  # a folder
        parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing later than this")
        parser.add_argument("--shape", default=DEFAULT, choices=sorted(CONFIGS), help="of the model")
        parser.add_argument("stage", choices=stages, help="what to measure")
        options = parser.read(arguments)
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error(f"torch {torch.__version__} sees no GPU; to try this out: --tiny")
        self.name: str = options.stage
        self.shape, self.seed = options.shape, options.seed
        self.device = torch.device(options.device)
        self.folder: Path = options.output
        self.is_smoke = self.shape == TINY
        self._limit = options.seconds
        self.found: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.shared: dict[str, Any] = {}
        self._facts: dict[str, Any] = {"machine": describe_machine(self.device) | {"packages": versions()}}
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._write("unfinished")

    @property
    def seconds_left(self) -> float:
        """Until nothing more should start."""
        return self._limit - (time.time() - self._started)

    @property
    def failed(self) -> list[str]:
        """What was found not to be `ok`, and what raised an error."""
        wrong = [key for key, value in self.found.items() if isinstance(value, dict) and value.get("ok") is False]
        return wrong + list(self.errors)

    def record(self, key: str, value: Any) -> None:
        """Keeps what was found under `key`, at once."""
        self.found[key] = value
        print(f"[{self.name}] {key}: {_short(value)}", flush=True)
        self._write("unfinished")

    def skip(self, key: str, reason: str) -> None:
        """Says why `key` was not measured."""
        self.skipped[key] = reason
        print(f"[{self.name}] {key}: skipped: {reason}", flush=True)
        self._write("unfinished")

    def attempt(self, key: str, work: Callable[[], T], needs: float = 0.0) -> T | None:
        """`work()`; None where it failed, with its error kept under `key`, or where fewer than `needs` seconds are
        left."""
        if self.seconds_left <= needs:
            self.skip(key, f"no time left: {max(self.seconds_left, 0.0):.0f} s, and {needs:.0f} s are needed")
            return None
        try:
            return work()
        except Exception as error:  # of a library, a kernel, or too little memory: all of them are results
            trace = traceback.format_exc()
            print(trace, file=sys.stderr, flush=True)
            text = f"{type(error).__name__}: {error}"
            # The beginning says what, the end of the trace where.
            self.errors[key] = text[:LONGEST_ERROR] + " | " + trace[-LONGEST_ERROR // 3 :]
            print(f"[{self.name}] {key}: FAILED: {text[:300]}", flush=True)
            self._write("unfinished")
            return None
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def measure(self, key: str, work: Callable[[], Any], needs: float = 0.0) -> Any:
        """Attempts `work` and records what it returned."""
        value = self.attempt(key, work, needs)
        if value is not None:
            self.record(key, value)
        return value

    def finish(self) -> int:
        """Writes the last state; 1 where anything failed, or nothing was measured."""
        self._write("complete" if not self.errors and not self.skipped else "complete, with gaps")
        print(f"[{self.name}] failed: {', '.join(self.failed) or 'nothing'}", flush=True)
        return int(bool(self.failed) or not self.found)

    def _write(self, status: str) -> None:
        result = {
            "stage": self.name, "status": status, "seconds": time.time() - self._started, "shape": self.shape,
            "seed": self.seed, **self._facts, "measured": self.found, "failed": self.failed, "errors": self.errors,
            "skipped": self.skipped,
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        # A stage killed while it writes must not lose what it had.
        write_atomically(self.folder / f"{self.name}.json", json.dumps(_plain(result), indent=1) + "\n")


def _plain(value: Any) -> Any:
    """`value` as JSON knows it: keys are strings, and there is no NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _short(value: Any) -> str:
    text = json.dumps(_plain(value))
    return text if len(text) < 400 else text[:400] + "..."
