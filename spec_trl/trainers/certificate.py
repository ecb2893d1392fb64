"""Writes the certificate of a training run: how far sampler and loss are apart in each step, and what is not exact.

It follows the records of the run's log (`run_log.py`), and computes nothing that they lack.
"""

from dataclasses import dataclass, field, replace
from importlib import metadata
from math import inf, isnan
from pathlib import Path
from typing import Literal

from ..json_files import read_json, write_json
from .run_log import Record, RolloutRecord, RunHeader, StepRecord


CERTIFICATE_FILE = "certificate.json"
_PACKAGES = ("spec_trl", "torch", "transformers", "trl")
_SHARE = 100
"""The file is written when it lacks more than one of so many steps, so that the bytes written by a run grow with its
length, not with its square."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A run from its start, or from a checkpoint, on. Its fields are those of :class:`RunHeader`, and:

    Args:
        first_step: its first optimizer step, counted from 1.
        autocast: of the training: "no", "bf16" or "fp16".
        versions: by package.
    """

    first_step: int
    started: str
    model: str
    hardware: str
    dtype: str
    autocast: str
    strategy: str
    exact_logprobs: bool
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of an optimizer step over all ranks.

    Args:
        distance: largest |sampler's log-probability - loss's|, in nats; None: no token was compared.
        compared: tokens, counted at each loss that they are compared in.
        drafted, accepted: draft tokens that the step's rollouts verified, and of these accepted.
    """

    step: int
    distance: float | None
    compared: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class NotExact:
    """`what` was not exact, not tried or not compared, from `first_step` on."""

    what: str
    first_step: int


@dataclass(kw_only=True)
class Content:
    """Content of the file; `distance` is the largest of all steps, counts are their sums."""

    version: Literal[1] = 1
    distance: float | None = None
    compared: int = 0
    drafted: int = 0
    accepted: int = 0
    not_exact: list[NotExact] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    steps: list[StepFigures] = field(default_factory=list)


class Certificate:
    """The certificate in `folder`, of a training under `autocast` ("no", "bf16", "fp16"). Only one process (rank 0)
    may write it."""

    def __init__(self, folder: Path | str, autocast: str) -> None:
        self._path, self._autocast = Path(folder) / CERTIFICATE_FILE, autocast
        self._header: RunHeader | None = None
        self.begin(0, None)

    def begin(self, step: int, checkpoint: str | None) -> None:
        """Begins after `step` steps. Those before come from the certificate next to `checkpoint`, if it has them."""
        self._content, self._first, self._written = Content(), step + 1, 0
        self._drafted = self._accepted = 0
        if checkpoint is not None and step:
            try:
                old = read_json(Path(checkpoint).parent / CERTIFICATE_FILE, Content, "certificate", "remove it")
                self._content = Content(
                    not_exact=[one for one in old.not_exact if one.first_step <= step],
                    parts=[part for part in old.parts if part.first_step <= step],
                    steps=[one for one in old.steps if one.step <= step],
                )
            except (OSError, ValueError) as error:
                self._note(f"not known up to step {step}: {error}", 1)
        if self._header is not None:  # training began again with a smaller batch
            self.add(self._header)

    def add(self, record: Record) -> None:
        """Takes a record of the log. Rollouts come before the step that trains on them."""
        content = self._content
        if isinstance(record, RunHeader):
            self._header = record
            versions = {name: metadata.version(name) for name in _PACKAGES}
            common = {name: vars(record)[name] for name in ("started", "model", "hardware", "dtype", "strategy")}
            part = Part(
                first_step=self._first, autocast=self._autocast, versions=versions,
                exact_logprobs=bool(record.settings.get("exact_logprobs")), **common,
            )  # fmt: skip
            content.parts = [one for one in content.parts if one.first_step < self._first] + [part]
            if record.not_compared is not None:
                self._note(f"not compared: {record.not_compared}", self._first)
        elif isinstance(record, RolloutRecord) and record.mode == "train":
            self._drafted += sum(counts.drafted for counts in record.per_depth.values())
            self._accepted += sum(counts.accepted for counts in record.per_depth.values())
            for what in record.not_exact:
                self._note(what, record.step + 1)
        elif isinstance(record, StepRecord):
            distance = record.sampler_distance
            if distance is not None and isnan(distance):
                self._note("a log-probability of the loss is NaN", record.step)
                distance = inf
            figures = StepFigures(
                step=record.step, distance=distance, compared=record.compared,
                drafted=self._drafted, accepted=self._accepted,
            )  # fmt: skip
            content.steps.append(figures)
            self._drafted = self._accepted = 0
            if len(content.steps) - self._written > len(content.steps) // _SHARE:
                self.write()

    def _note(self, what: str, first_step: int) -> None:
        if what not in [one.what for one in self._content.not_exact]:
            self._content.not_exact.append(NotExact(what, first_step))

    def write(self) -> None:
        """Writes what the file lacks."""
        steps = self._content.steps
        if len(steps) == self._written:
            return
        distances = [one.distance for one in steps if one.distance is not None]
        sums = {name: sum(vars(one)[name] for one in steps) for name in ("compared", "drafted", "accepted")}
        write_json(self._path, replace(self._content, distance=max(distances, default=None), **sums))
        self._written = len(steps)
