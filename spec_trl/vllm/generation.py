"""TRL's `VLLMGeneration` with an engine that drafts, and a drafter that follows the policy."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from ..generation.drafters.checkpoints import read_checkpoint
from ..generation.drafters.mtp.mtp_drafter import has_head
from ..trainers.run_log import Mode, RolloutRecord
from ..trainers.run_verdict import CollapseAlarm
from ..trainers.saved_heads import heads_of
from . import plugin
from .client import DraftingClient
from .counts import Counts
from .drafting import drafting_of
from .rollouts import Sums, record_of
from .transport import Weights, hand_over


STALE = 0.75
"""Share of the first rollout's acceptance; below it a drafter no longer fits the policy. Pushed ones stay above."""


@contextmanager
def engine_that_drafts(trainer_module: Any, args: Any) -> Iterator[None]:
    """While a trainer of TRL is made, the name VLLMGeneration in its module is ours."""
    plugin.check_release()
    plugin.load()
    with mock.patch.object(trainer_module, "VLLMGeneration", partial(DraftingGeneration, args=args)):
        yield


class DraftingGeneration(VLLMGeneration):
    """TRL's, whose engine drafts. After each optimizer step a drafter that is a copy gets the policy's weights.

    Args:
        model, options, more: as TRL's.
        args: of the trainer.

    Attributes:
        drafting: how vLLM drafts.
        sums: of the rollout so far.
        trained_along: returns tensors of a head that learns from the loss forward of the policy, by strategy.
    """

    trained_along: Callable[[PreTrainedModel, str], Mapping[str, Tensor]] | None = None

    def __init__(self, model: Any, *options: Any, args: Any, **more: Any) -> None:
        self._policy = policy = model.get_base_model() if isinstance(model, PeftModel) else model
        self._has_gpu = torch.cuda.is_available()
        self._device = "cuda" if self._has_gpu else "cpu"
        self.drafting = drafting_of(
            args.assistant_strategy, args.rollout_config(), args.assistant_model, policy.name_or_path,
            has_head(policy, {}), self._device,
        )  # fmt: skip
        if self.drafting.speculative is not None and args.min_p:
            raise ValueError(
                f"min_p={args.min_p} does not go with drafts in vLLM, which would refuse the first rollout. Set "
                'min_p=None, or assistant_strategy="none".'
            )
        self.sums = Sums()
        self._stale = CollapseAlarm(by_first_token=True, share=STALE, keeps_first=True)
        super().__init__(model, *options, **more)

    def _init_vllm(self) -> None:
        arguments = self.drafting.engine_arguments(self._device) | {"disable_log_stats": False}
        if not self._has_gpu:
            arguments |= {"enforce_eager": True, "dtype": str(self.model.dtype).removeprefix("torch.")}
        make = vllm_generation.LLM
        with (
            mock.patch.object(vllm_generation, "LLM", lambda **theirs: make(**theirs | arguments)),
            mock.patch.object(vllm_generation, "VLLMClient", partial(DraftingClient, drafting=self.drafting)),
        ):
            super()._init_vllm()

    def sync_weights(self) -> None:
        """Pushes the policy, and the drafter if it is a copy; each parameter is gathered once for both."""
        started = time.perf_counter()
        self._sync()
        self.sums.push_seconds += time.perf_counter() - started

    def _sync(self) -> None:
        if self.mode == "server":
            super().sync_weights()  # by our client
            head = self._head()  # on every rank: it may be made now
            if head and self.accelerator.is_main_process:
                self.vllm_client.update_drafter(head)
            return
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        kept: list[tuple[str, Tensor]] = []
        self._push("start_weight_update", self._gathered(kept))
        if drafter := kept or [*self._head().items()]:
            self._push("start_draft_weight_update", drafter)
        self.llm.reset_prefix_cache()

    def _head(self) -> Mapping[str, Tensor]:
        """Weights of a drafter that is no copy: of a head that learned, or, where sleep drops them, as it was."""
        strategy = self.drafting.strategy
        if self.drafting.speculative is None or strategy not in ("model", "eagle3", "mtp"):
            return {}
        learned = self.trained_along(self._policy, strategy) if self.trained_along is not None else {}
        if learned or not self.enable_sleep_mode:
            return learned
        checkpoint = self.drafting.speculative.get("model")
        return heads_of(self._policy) if checkpoint is None else read_checkpoint(checkpoint)[1]

    def _gathered(self, kept: list[tuple[str, Tensor]]) -> Weights:
        """The policy's weights. A drafter's are `kept`: on the host, where the policy's exist only for a moment."""
        passing = self._dist.is_fsdp or self._dist.zero_stage == 3 or isinstance(self.model, PeftModel)
        for name, weight in self._iter_named_params():
            if self.drafting.is_copy:
                kept.append((name, weight.to("cpu", copy=True) if passing else weight))
            yield name, weight

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        ties = bool(getattr(self.model.config, "tie_word_embeddings", False)) and not self._has_gpu
        for name, weight in super()._iter_named_params():
            yield name, weight
            if ties and name.endswith("embed_tokens.weight"):
                yield "lm_head.weight", weight  # a CPU packs the head, which then follows its own name alone

    def _push(self, session: str, weights: Weights) -> None:
        try:
            self.llm.collective_rpc(session)
            self.llm.collective_rpc("update_weights", args=(hand_over(weights),))
            self.llm.collective_rpc("finish_weight_update")
        except Exception as error:
            raise RuntimeError(
                f"vLLM has taken weights in part: {type(error).__name__}: {error}. Resume from the newest checkpoint, "
                "which is whole."
            ) from error

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        before = self._counts()
        found = super().generate(*args, **kwargs)
        _, completions, logprobs, _ = found
        self.sums.counts += self._counts() - before
        self.sums.requests += len(completions)
        self.sums.tokens += sum(map(len, completions))
        sampled = [one[0] for row in logprobs or () for one in row if one[0] is not None]
        self.sums.entropy -= sum(sampled)
        self.sums.scored += len(sampled)
        return found

    def finish(self, seconds: float, place: tuple[Mode, int, int]) -> RolloutRecord:
        """The record of the rollout so far (:func:`record_of`); the next one begins."""
        sums, self.sums = self.sums, Sums()
        record = record_of(self.drafting, sums, seconds, place, self.accelerator)
        if record.mode == "train":
            self._stale.add(record)
        return record

    def _counts(self) -> Counts:
        if self.mode == "colocate":
            return Counts.of_metrics(self.llm.get_metrics())
        return self.vllm_client.counts() if self.accelerator.is_main_process else Counts()
