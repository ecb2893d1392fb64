"""Whether captured forwards outlive a rollout: where training steps leave their memory free."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from ..generation.engine.memory import forget_peak, peak_memory
from ..generation.session import capturing_session


MARGIN = 0.1
"""Share of the device's memory that is left beside the largest peak so far and what is kept: for fragments, and for
texts that are longer than any before."""
logger = logging.getLogger(__name__)


class KeptGraphs:
    """What a rank's rollouts have captured, and its K/V cache: kept or freed after each, by the peak of memory in the
    training so far, from the first optimizer step on: it is then that an optimizer takes its memory. Each rank decides
    for itself: no token depends on it.

    Args:
        setting: `keep_graphs`; with True and False :func:`~spec_trl.generation.decoding.speculative_decoding` keeps or
            frees it.
        device: of the training.
        in_place: whether the weights of a rollout lie where those of the one before lay; else nothing is kept under
            "auto", as everything would be captured again.
    """

    def __init__(self, setting: bool | Literal["auto"], device: torch.device, in_place: bool) -> None:
        self._decides, self._may_keep, self._device = setting == "auto", in_place, device
        self._first_step: int | None = None  # optimizer steps when the first rollout ended; None: none has
        self._kept = 0  # bytes of the peak that are not training's
        self._peak = 0  # bytes that training took at most

    @contextmanager
    def rollout(self, policy: nn.Module, steps: int) -> Iterator[None]:
        """Surrounds a rollout of `policy`, which may be wrapped, after so many optimizer steps."""
        found = None if self._first_step is None else peak_memory(self._device)
        if found is not None:
            self._peak = max(self._peak, found[0] - self._kept)
        yield
        session = capturing_session(policy)
        if not self._decides or session is None or session.runner is None:
            return
        held, captured = session.runner.held_bytes, session.runner.captured[1]
        has_trained = self._first_step is not None and steps > self._first_step
        keeps = self._may_keep and has_trained and found is not None and held <= found[1] * (1 - MARGIN) - self._peak
        what = "captured forwards, K/V and copies of weights"
        logger.info("%s, %.2f GiB, are %s", what, held / 2**30, "kept" if keeps else "freed")
        if not keeps:
            session.drop_runner()
        # Between replays captured forwards use almost nothing of their pool, so the peak does not count it.
        self._kept = held - captured if keeps else 0
        self._first_step = steps if self._first_step is None else self._first_step
        forget_peak(self._device)

    @contextmanager
    def give_way(self, policy: nn.Module) -> Iterator[None]:
        """Surrounds the training of `policy`: where memory ends, frees what is kept, and keeps nothing any more."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if (session := capturing_session(policy)) is not None and session.runner is not None:
                error.add_note(
                    f"{session.runner.held_bytes / 2**30:.2f} GiB were kept for the next rollout (captured forwards, "
                    "K/V cache, copies of weights) and are free now. keep_graphs=False frees them after each rollout."
                )
                session.drop_runner()
            self._may_keep = False
            raise
