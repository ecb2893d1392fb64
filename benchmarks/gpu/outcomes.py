"""A plugin of pytest (`-p benchmarks.gpu.outcomes`) that keeps outcomes in the JSON file that the variable OUTCOMES
names, as they come: a run that is killed leaves those that it had."""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch


LONGEST_ERROR = 1500  # characters
EVERY = 2.0  # seconds between writes


class Outcomes:
    """Of the tests so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._started, self._written = path, time.time(), 0.0
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._machine = {"accelerator": gpu, "torch": torch.__version__}
        self._counts: Counter[str] = Counter()
        self._failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once; an error before or after it is a failure too."""
        if report.failed:
            self._failed[report.nodeid] = report.longreprtext[-LONGEST_ERROR:]
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._counts[report.outcome] += 1
        self._write("unfinished", EVERY)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure."""
        if report.failed:
            self._failed[report.nodeid] = report.longreprtext[-LONGEST_ERROR:]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write("complete" if exitstatus in (0, 1) else f"pytest ended with {exitstatus}")

    def _write(self, status: str, every: float = 0.0) -> None:
        now = time.time()
        if now - self._written >= every:
            self._written = now
            result: dict[str, Any] = {
                "stage": self._path.stem, "status": status, "seconds": now - self._started,
                "machine": self._machine,
                "measured": {"tests": {name: self._counts[name] for name in ("passed", "failed", "skipped")}},
                "failed": list(self._failed), "errors": self._failed,
            }  # fmt: skip
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(result, indent=1) + "\n")
            part.replace(self._path)


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes the first one alone hears of all tests."""
    if not hasattr(config, "workerinput") and "OUTCOMES" in os.environ:
        config.pluginmanager.register(Outcomes(Path(os.environ["OUTCOMES"])))
