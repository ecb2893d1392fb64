"""Gathers a sharded policy's weights for a rollout, and frees captured forwards that do not fit.

Ranks run different numbers of forwards in a rollout, so no forward may wait for another rank. TRL gathers the shards
of DeepSpeed ZeRO-3. Under FSDP2 it leaves gathering to the hooks of every forward, so this module gathers.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..generation.engine.kv.memory import forget_peak, peak_memory
from ..generation.engine.requirements import policy_in
from ..generation.session import capturing_session


MARGIN = 0.1
"""Share of the device's memory that stays free beside the largest peak so far and the captured forwards: for
fragments, and for longer texts."""
logger = logging.getLogger(__name__)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields the policy in `model` with plain Parameters, under FSDP2 in the `param_dtype` of its mixed precision. All
    ranks must enter and leave."""
    policy, sharded = policy_in(model), [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        yield policy
        return
    try:
        for module in sharded:
            module.unshard()
        policy._is_fsdp_managed_module = False  # by it transformers decides whether a forward waits for other ranks
        yield policy
    finally:
        policy._is_fsdp_managed_module = True
        for module in sharded:
            module.reshard()


class KeptGraphs:
    """Keeps or frees a rank's captured forwards and K/V cache after every rollout, by the peak of memory in the
    training so far, from the first optimizer step on, when the optimizer allocates. Ranks may decide differently: no
    token depends on it.

    Args:
        setting: `keep_graphs`; :func:`~.speculative_decoding` obeys True and False.
        in_place: whether weights have the same addresses in every rollout; else "auto" keeps nothing, since all would
            be captured again.
    """

    def __init__(self, setting: bool | Literal["auto"], device: torch.device, in_place: bool) -> None:
        self._decides, self._may_keep, self._device = setting == "auto", in_place, device
        self._first_step: int | None = None  # optimizer steps when the first rollout ended; None: no rollout has ended
        self._held = 0  # bytes of the peak that training did not take
        self._peak = 0  # most bytes that training took

    @contextmanager
    def rollout(self, policy: nn.Module, steps: int) -> Iterator[None]:
        """Surrounds a rollout of `policy` (perhaps wrapped) after so many optimizer `steps`."""
        usage = None if self._first_step is None else peak_memory(self._device)  # peak and total, bytes
        if usage is not None:
            self._peak = max(self._peak, usage[0] - self._held)
        yield
        session = capturing_session(policy)
        if not self._decides or session is None or session.runner is None:
            return
        held, captured = session.runner.held_bytes, session.runner.captured[1]
        has_trained = self._first_step is not None and steps > self._first_step
        keeps = self._may_keep and has_trained and usage is not None and held <= usage[1] * (1 - MARGIN) - self._peak
        what = "captured forwards, K/V and copies of weights"
        logger.info("%s, %.2f GiB, are %s", what, held / 2**30, "kept" if keeps else "freed")
        if not keeps:
            session.drop_runner()
        # Between replays captured forwards use almost nothing of their pool, so the peak leaves the pool out.
        self._held = held - captured if keeps else 0
        self._first_step = steps if self._first_step is None else self._first_step
        forget_peak(self._device)

    @contextmanager
    def give_way(self, policy: nn.Module) -> Iterator[None]:
        """Surrounds the training of `policy`; frees captured forwards and cache for good if memory runs out."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if (session := capturing_session(policy)) is not None and session.runner is not None:
                error.add_note(
                    f"{session.runner.held_bytes / 2**30:.2f} GiB were kept for the next rollout (captured forwards, "
                    "K/V cache, copies of weights) and are free now. keep_graphs=False frees them after each rollout."
                )
            self.free(policy)
            raise

    def free(self, policy: nn.Module) -> None:
        """Frees captured forwards and cache of `policy`, and keeps none from now on."""
        if (session := capturing_session(policy)) is not None:
            session.drop_runner()
        self._may_keep = False
