"""What a run writes down of its rollouts: the log, which a header opens, and the verdict."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..hardware import hardware_name
from .run_log import LOG_FILE, Record, RunHeader, RunLog
from .run_verdict import Verdict


class RunRecords:
    """The records of a run.

    Args:
        folder: of the log; None: no log is written.

    Attributes:
        verdict: on the records of the newest part of the run.
        log: None without a folder.
    """

    def __init__(self, folder: Path | str | None) -> None:
        self._folder = folder
        self.begin()

    def begin(self) -> None:
        """Begins a part of the run, which has its header in the log."""
        self.verdict, self._is_new = Verdict(), True
        self.log = None if self._folder is None else RunLog(Path(self._folder) / LOG_FILE)

    def append(self, record: Record, header: Callable[[], RunHeader]) -> None:
        """Adds a record to verdict and log, after the `header` if it is the first."""
        records = [header(), record] if self._is_new else [record]
        self._is_new = False
        for one in records:
            self.verdict.add(one)
            if self.log is not None:
                self.log.append(one)


def describe(model: Any, device: torch.device, strategy: str, **more: Any) -> RunHeader:
    """The header of a run that drafts for `model` by `strategy`; `more`: its other fields."""
    return RunHeader(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=hardware_name(device),
        model=model.config._name_or_path or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        strategy=strategy,
        **more,
    )
