"""Samples a policy's rollouts and logs them; its two verbs are `refresh` and `rollout`.

:class:`~.TrainerSpeculator` takes prompts of all ranks for our trainers, :func:`~.speculate` the calls of `generate`
of any trainer or loop. Shared here: noise counters, sums of a rollout, log and verdict.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..generation.engine.drafter import Drafter
from ..generation.options import SpeculativeConfig
from ..generation.strategies import policy_copies
from ..hardware import hardware_name
from .certificate import Certificate
from .run_log import LOG_FILE, Mode, PlainCall, Record, RolloutRecord, RunHeader, RunLog, StepRecord
from .run_verdict import Verdict
from .step_totals import RolloutSums, metrics


class Speculator:
    """The rollouts of a run.

    Args:
        folder: of the log; None: no log is written.

    Attributes:
        counts: number of rollouts by mode. Each mode has its own noise: an evaluation leaves training samples as they
            are.
        verdict: whether the rollouts of the newest part of the run gained from drafts, in a sentence.
        log: None without a folder.
        certificate: None: another process writes it, or the trainer is none of ours.
    """

    certificate: Certificate | None = None

    def __init__(self, strategy: str, config: SpeculativeConfig, folder: Path | str | None) -> None:
        self._strategy, self._config, self._folder = strategy, config, folder
        self.counts: dict[str, int] = {"train": 0, "eval": 0}
        self.begin_run()
        self._begin("train", 0)

    @abstractmethod
    def refresh(self) -> None:
        """Makes the next rollout draft with the policy's new weights."""

    @abstractmethod
    def rollout(self, *args: Any, **kwargs: Any) -> Any:
        """Samples completions."""

    def begin_run(self) -> None:
        """Begins a part of the run, with its own header in the log."""
        self.verdict, self._is_new = Verdict(), True
        self.log = None if self._folder is None else RunLog(Path(self._folder) / LOG_FILE)

    def _begin(self, mode: Mode, step: int) -> None:
        self._mode, self._step, self._sums = mode, step, RolloutSums()

    def _finish(
        self, policy: Any, drafters: Sequence[Drafter], draft_lengths: Mapping[str, int]
    ) -> tuple[RolloutRecord, dict[str, float]]:
        """Logs the rollout of `policy`, with the γ in force by strategy; returns its record and TRL's metrics."""
        record = self._sums.record(self._mode, self.counts[self._mode], self._step, self._strategy, draft_lengths)
        self._append(record, policy)
        return record, metrics(record, bool(policy_copies(drafters)), several_chains=self._strategy == "best_of_n")

    def log_step(
        self,
        policy: Any,
        step: int,
        seconds: float,
        phases: dict[str, float],
        reward: float | None,
        compared: tuple[float | None, int] = (None, 0),
    ) -> None:
        """Logs an optimizer step; the arguments are those of :class:`StepRecord`, the last two of them as one."""
        self._append(StepRecord(step, seconds, phases, reward, *compared), policy)

    def log_plain_call(self, policy: Any, reason: str) -> None:
        self._append(PlainCall(reason), policy)

    def _append(self, record: Record, policy: Any) -> None:
        records = [self._header(policy), record] if self._is_new else [record]
        self._is_new = False
        for one in records:
            self.verdict.add(one)
            if self.log is not None:
                self.log.append(one)
            if self.certificate is not None:
                self.certificate.add(one)

    def _header(self, policy: Any, **more: Any) -> RunHeader:
        return RunHeader(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            model=policy.config._name_or_path or type(policy).__name__,
            dtype=str(policy.dtype).removeprefix("torch."),
            strategy=self._strategy,
            **{"hardware": hardware_name(policy.device)} | more,
        )
