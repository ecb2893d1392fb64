"""Drafts with the policy's quantized copy, and refreshes it (ER §3.1). It shares the target's K/V cache."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import PreTrainedModel

from ...quantization import quantize_projections
from ...quantization.awq import ActivationStatistics
from ...quantization.kernels import PackedWeight
from ...quantization.source_weight import modules_by_name
from ..engine.network.foreign_layers import is_foreign
from ..engine.network.shadow import make_shadow
from ..engine.network.snapshot import WeightState
from ..engine.sampling.accept import Proposal
from ..engine.sampling.noise import RoundNoise
from ..options import SpeculativeConfig
from ..registry import register_drafter
from .autoregressive import NetworkDrafter


# Kernels with locks or partial sums shared between thread blocks: drafting and learning must not run them at once.
_ONE_STREAM = {"humming", "marlin"}


@register_drafter
class SelfDrafter(NetworkDrafter):
    """A twin of the policy with quantized projections; all other modules share the policy's weights.

    Arguments are those of :func:`~.quantize_projections`; the policy is never changed. With `packs_later` weights are
    quantized before the first draft: a copy that never drafts costs almost nothing.

    Attributes:
        is_stale: whether it must be packed (again) before it drafts.
    """

    strategy = "self"
    reads_prompts = False  # it drafts after the target's K/V

    def __init__(
        self, policy: PreTrainedModel, quantization: str = "auto", kernel: str = "auto", lm_head: str = "auto",
        packs_later: bool = False,
    ) -> None:  # fmt: skip
        twin = make_shadow(policy)
        for module in filter(is_foreign, twin.modules()):
            module.training = True  # it packs no weights of the policy, whose mode may change
        self.quantized = quantize_projections(twin, quantization, kernel, lm_head, pack=not packs_later)
        self.max_rows = self.quantized.max_rows
        super().__init__(twin, shares_target_cache=True)
        self.refresh_seconds = 0.0
        """Total time that drafting waited for refreshes."""
        self.is_stale = packs_later
        self._statistics: ActivationStatistics | None = None
        self._policy = ref(policy)
        self._weights = WeightState(policy)
        self._may_have_changed = False
        self._is_first = True  # draft

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "SelfDrafter":
        return cls(model, *cls.kept_for(model, None, config), packs_later=True)

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[str, str, str]:
        return config.draft_quantization, config.draft_kernel, config.efficient_rollout.lm_head

    @classmethod
    def make_student(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "SelfDrafter":
        if assistant is not None:
            name = assistant if isinstance(assistant, str) else type(assistant).__name__
            raise ValueError(
                f"assistant_model={name!r} is given, and tts.drafter='self' uses none. Drop it, or say what it is: "
                "tts.drafter='eagle3', 'dflash' or 'model'."
            )
        student = cls(model, *cls.kept_for(model, None, config))
        modules = (module for layer in student.quantized.layers.values() for module in layer.modules())
        names = {module.name for module in modules if isinstance(module, PackedWeight)}
        if config.tts.asynchronous and (alone := sorted(names & _ONE_STREAM)):
            raise ValueError(
                f"tts.asynchronous=True with layers of the kernels {alone}, whose scratch memory serves one stream. "
                'Set draft_kernel="triton" or "torch_int4", or tts.asynchronous=False.'
            )
        return student

    def refresh(self, statistics: ActivationStatistics | None = None) -> None:
        """Requantizes the policy's current weights into the same buffers (ER §3.1, Algorithm 1 line 3).

        The "awq" schemes choose their scales by `statistics` of the policy's forwards in the step before, over
        `quantized.activation_aware_layers`, and without them round to nearest (ER §C.4).
        """
        self.quantized.refresh(statistics)
        self.is_stale, self.max_rows = False, self.quantized.max_rows  # the first one may measure the kernels

    def refresh_if_changed(self) -> None:
        """Requantizes before the next draft if the policy's weights have changed since the last check
        (:class:`~.WeightState`)."""
        self._may_have_changed = True

    def refresh_before_drafting(self, statistics: ActivationStatistics | None = None) -> None:
        """Refreshes before the next draft: a rollout without drafts does not pay for it."""
        self.is_stale, self._statistics = True, statistics

    @property
    def policy_copies(self) -> "tuple[SelfDrafter]":  # type: ignore[override]
        return (self,)

    @functools.cached_property
    def row_bytes(self) -> int:
        policy = self._policy()  # packed layers run when something is drafted
        assert policy is not None
        return self._family.row_bytes(policy)

    @property
    def waited(self) -> float:
        return self.refresh_seconds

    def trained(self, network: PreTrainedModel) -> list[nn.Parameter]:
        return []  # all of them are the policy's

    def refresh_if_stale(self) -> None:
        policy = self._policy() if self._may_have_changed else None
        if policy is not None and self._weights != (present := WeightState(policy)):
            self.refresh_before_drafting()
            self._weights = present
        self._may_have_changed = False
        if self.is_stale:
            started = time.perf_counter()
            self.refresh(self._statistics)
            if self.network.device.type == "cuda":
                torch.cuda.synchronize()
            self.refresh_seconds += time.perf_counter() - started

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self.refresh_if_stale()
        if not self._is_first:
            return super().propose(draft_length, noise)
        with self._watched_policy() as ran:
            proposal = super().propose(draft_length, noise)
        # A twin that silently runs the policy's layers would be slow and unnoticed. Replays run no layer.
        if self._runner.eager_forwards:
            self.quantized.assert_all_called(aside=self.quantized.layers.keys() - ran)
            self._is_first = False
        return proposal

    @contextmanager
    def _watched_policy(self) -> Iterator[set[str]]:
        """Collects the names of packed layers whose originals in the policy run inside the block: an error."""
        ran: set[str] = set()
        policy = self._policy()
        assert policy is not None
        modules = modules_by_name(policy)
        hooks = [
            modules[name].register_forward_pre_hook(lambda *_, name=name: ran.add(name))
            for name in self.quantized.layers
        ]
        try:
            yield ran
        finally:
            for hook in hooks:
                hook.remove()
