"""Where the time of a training step goes (ER Fig. 2a, 6)."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """Splits each optimizer step into the phases that ER Fig. 2a names; a GPU is waited for where one ends.

    Args:
        device: of the training.
        on_step: called with (step, seconds, seconds by phase) at the end of each step. Phases are "rollout", "reward",
            "logprobs", "adaptation" (of a learned drafter), "update" (the rest of forward, backward and optimizer) and
            "other" (advantages, logging).
    """

    def __init__(self, device: torch.device, on_step: Callable[[int, float, dict[str, float]], None]) -> None:
        self._device = device
        self._on_step = on_step
        self._seconds: dict[str, float] = {}
        self._started = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to `name`; "prepare" surrounds all but update and adaptation."""
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seconds = {}
        self._started = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = self._now() - self._started
        prepare, adaptation = (self._seconds.get(name, 0.0) for name in ("prepare", "adaptation"))
        phases = {name: self._seconds.get(name, 0.0) for name in ("rollout", "reward", "logprobs")}
        other = max(prepare - sum(phases.values()), 0.0)
        phases |= {"adaptation": adaptation, "update": seconds - prepare - adaptation, "other": other}
        self._on_step(state.global_step, seconds, phases)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
