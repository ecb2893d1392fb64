"""Overrides TRL's on-policy trainers so that rollouts are speculative."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
from transformers import PreTrainedModel
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ..distributed.link import naming_the_remedy
from ..distributed.shared_rollouts import Sampled
from ..generation.engine.requirements import policy_in
from ..generation.refusals import NOT_ADAPTED
from ..papers import load
from .checkpoint import find_checkpoint
from .exact_logprobs import ExactLogprobs
from .prompt_media import media_inputs
from .rollout_memory import KeptGraphs, whole_weights
from .rollout_options import RolloutOptions
from .run_log import Mode
from .sampled_support import SUPPORT, SampledSupport
from .sampler_mismatch import SamplerMismatch, changed_by
from .saved_heads import head_of, keep_heads
from .step_totals import StepClock
from .trainer_checks import (
    asked,
    check_attributes,
    check_drawn,
    check_methods,
    check_trainer,
    generates_by_us,
)
from .trainer_speculator import TrainerSpeculator


if TYPE_CHECKING:
    from trl import GRPOTrainer as TrainerOfTRL
else:
    TrainerOfTRL = object


def _engine(theirs: type, args: Any) -> AbstractContextManager[None]:
    """Around TRL's `__init__`: under use_vllm the engine that it makes drafts."""
    if not getattr(args, "use_vllm", False):
        return nullcontext()
    modules = (sys.modules[one.__module__] for one in theirs.__mro__)  # GMPO's has GRPO's `__init__`
    module = next(one for one in modules if hasattr(one, "VLLMGeneration"))
    made: AbstractContextManager[None] = load("vllm.generation").engine_that_drafts(module, args)
    return made


class SpeculativeRollouts(TrainerOfTRL):
    """Precedes a trainer of TRL that samples in `_generate_single_turn` among the base classes of a trainer, and
    samples each of its rollouts by a :class:`TrainerSpeculator`.

    Args:
        learned_from: second argument of TRL's trainer.
        args: None: the default config.
        rest, kwargs: its other arguments.

    Attributes:
        rollout_backend: that a `rollout_func` samples with; None: it does not.
        config_class: of `args`.
        lacking: methods and attributes that TRL's trainer lacks, and that no rollout needs.

    Raises:
        ValueError: `args` is no `config_class`, or a rollout of this model under `args` would fail.
    """

    rollout_backend: Any = None
    config_class: ClassVar[type[RolloutOptions]]
    lacking: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: Any, learned_from: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        config_class = self.config_class
        if args is None:
            args = config_class(output_dir=config_class.__name__.removesuffix("Config"))
        elif not isinstance(args, config_class):
            trainer, needed = type(self).__name__, config_class.__name__
            raise ValueError(f"args is a {type(args).__name__}; {trainer} needs a {needed}.")
        classes = type(self).__mro__
        at = classes.index(SpeculativeRollouts)
        theirs = next(one for one in classes[at + 1 :] if one.__module__.startswith("trl."))  # not a user's mixin
        check_methods(classes[at - 1], theirs, self.lacking)
        with _engine(theirs, args):
            super().__init__(model, learned_from, args, *rest, **kwargs)
        if getattr(args, "use_vllm", False):  # TRL makes neither
            self.generation_config = self.generation_kwargs = None
        check_attributes(self, theirs, self.lacking)
        config = args.rollout_config()
        features = asked(self, config)
        self._processors = check_trainer(self, config, features)
        adapts = args.adaptation is not None and not any(features[name] for name in NOT_ADAPTED)
        parks = bool(getattr(self, "tools", None))
        scores = "_get_per_token_logps_and_entropies" not in self.lacking
        self._mismatch = SamplerMismatch(self.accelerator, args, self._processors, scores)
        keeps = args.logprobs_over == "support" and changed_by(self._processors or (), args.temperature) is not None
        self._support = SampledSupport(self.accelerator, args.temperature) if keeps else None
        self._speculator = TrainerSpeculator(
            args, self.accelerator, self._whole_policy, adapts, parks, self._mismatch.not_compared, keeps
        )
        self._vllm_alarm: Any = None  # under use_vllm, of samples that are not the policy's
        if getattr(args, "use_vllm", False):
            self._vllm_alarm = load("vllm.rollouts").DistanceAlarm(policy_in(self.model).dtype)
            self.vllm_generation.trained_along = self._speculator.trained_along
        self._drafted_step = -1  # optimizer steps at the newest rollout; -1: weights may have changed without a step
        self._resumed_from: str | None = None
        self._attempts = 0  # of a `train`, restarted with a smaller batch under auto_find_batch_size
        in_place = self._dist.zero_stage != 3 and not self._dist.is_fsdp
        self._graphs = KeptGraphs(config.keep_graphs, self.accelerator.device, in_place)
        self._exact: ExactLogprobs | None = None
        self._tool_mask: Iterable[Any] | None = None  # of the next rows that are scored
        if args.exact_logprobs:
            self._exact = ExactLogprobs(self.model, self.accelerator, config, self._processors, self._support)
        self._clock = StepClock(self.accelerator.device, self._log_step, self._begin_attempt)
        self.add_callback(self._clock)
        speculator = ref(self._speculator)
        keep_heads(policy_in(self.model), lambda: head_of(() if (one := speculator()) is None else one.drafters))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        # Before and after a run weights may be replaced without a step (resuming, a second run,
        # load_best_model_at_end).
        self._drafted_step, self._attempts = -1, 0
        self._speculator.begin_run()
        checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir)
        self._resumed_from = checkpoint if isinstance(checkpoint, str) else None
        try:
            with naming_the_remedy(self.accelerator.process_index), self._graphs.give_way(self.model):
                result = super().train(checkpoint, *args, **kwargs)
        finally:
            self._drafted_step = -1
            if self._speculator.certificate is not None:
                self._speculator.certificate.write()
        verdict = self._speculator.verdict
        if self.accelerator.is_main_process and verdict.rollouts:
            print(f"spec_trl verdict: {verdict}")
        return result

    def _begin_attempt(self, step: int) -> None:
        """Begins a training loop, from a checkpoint if `step` is not 0."""
        self._attempts += 1
        if self._attempts > 1:  # memory ended in the one before
            self._graphs.free(self.model)
        if self._speculator.certificate is not None:
            self._speculator.certificate.begin(step, self._resumed_from)
        if self._resumed_from is None:
            return
        batches = self.callback_handler.train_dataloader.batch_sampler
        batches = getattr(batches, "batch_sampler", batches)  # of several ranks each takes some of its batches
        for _ in range(int(self.state.epoch or 0)):  # a sampler draws an order per epoch: skip those of earlier ones
            next(iter(getattr(batches, "sampler", ())), None)
        self._speculator.load(self._resumed_from)

    # ---- a training step --------------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._clock.end("prepare")
        self._tool_mask = inputs.get("tool_mask")
        if self._support is not None:
            self._support.rows = inputs[SUPPORT]
        speculator = self._speculator
        with ExitStack() as watched:
            if speculator.activations is not None:  # AWQ: the next refresh scales by the inputs of projections
                watched.enter_context(speculator.activations.collect(self.state.global_step))
            if speculator.adaptation is not None and self.model.training:
                watched.enter_context(speculator.adaptation.watch(inputs))  # a drafter learns from hidden states
            return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._clock.begin("prepare")
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if (adaptation := self._speculator.adaptation) is not None:
            with self._clock.phase("adaptation"):  # the backward pass has freed the memory of the forward
                adaptation.update()
            if self.accelerator.sync_gradients:
                for name, value in adaptation.take_metrics().items():
                    self._metrics["train"][f"drafter/{name}"].append(value)
        return loss

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.phase("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        score: Any = super()._get_per_token_logps_and_entropies
        if self._exact is not None:
            has_entropies = kwargs.get("compute_entropy", False)
            model = self._exact.instead_of(model, logits_to_keep, has_entropies, self._tool_mask)
        elif self._support is not None:
            score = self._support
        with self._clock.phase("logprobs") if not torch.is_grad_enabled() else nullcontext():
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _log_step(self, step: int, seconds: float, phases: dict[str, float]) -> None:
        rewards = self._metrics["train"].get("reward")
        reward = rewards[-1] if rewards else None
        self._speculator.log_step(self.model, step, seconds, phases, reward, self._mismatch.take())

    def _log_mismatch(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        mode: Mode = "train" if self.model.training else "eval"
        step = self.state.global_step  # it counts only optimizer steps
        if step != self._drafted_step:
            self._speculator.refresh()
        self._speculator.begin(mode, step)
        started = time.perf_counter()
        with self._clock.phase("rollout"), self._graphs.rollout(self.model, step):
            result = super()._generate(prompts)
        seconds = time.perf_counter() - started
        self._drafted_step = step
        self._tool_mask = result[2] if getattr(self, "tools", None) else None
        logged: dict[str, float] = {}
        if self._vllm_alarm is not None and getattr(self, "rollout_func", None) is None:
            place = mode, self._speculator.counts[mode], step
            logged = self._speculator.log_rollout(self.model, self.vllm_generation.finish(seconds, place))
        elif generates_by_us(self) or self.rollout_backend is not None:
            if self.rollout_backend is not None:  # other ranks may take more turns
                self._speculator.join_others(self.generation_config, self._tokenizer)
            logged = self._speculator.finish(self.model)
        for name, value in logged.items():
            self._metrics[mode][f"rollout/{name}"].append(value)
        self._speculator.counts[mode] += 1
        if self._support is not None:
            self._support.take(result[0], result[1], self._speculator.supports)
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._vllm_alarm is not None:
            mode = "train" if self.model.training else "eval"
            for distance in self._metrics[mode].get("sampling/sampling_logp_difference/mean", [])[-1:]:
                self._vllm_alarm.add(distance)
        return output if self._support is None else output | {SUPPORT: self._support.rows}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        if self._vllm_alarm is not None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *rest, **more)
        policy, has_tools = policy_in(self.model), bool(getattr(self, "tools", None))
        inputs = media_inputs(images, multimodal_fields, policy, self.args, has_tools)
        check_drawn(policy, self.generation_config, prompt_ids, self._tokenizer)
        return self._in_turn(self.sample(prompt_ids, inputs))

    def sample(self, prompt_ids: list[list[int]], media: Mapping[str, Any] | None = None) -> list[Sampled]:
        """Takes a turn of all ranks: a completion of each prompt. `media`: inputs as of :func:`~.media_inputs`."""
        return self._speculator.rollout(prompt_ids, self.generation_config, self._tokenizer, media)

    def _in_turn(self, completions: list[Sampled]) -> Any:
        """Returns `completions` as TRL's method returns them."""
        return [sampled.tokens for sampled in completions]

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._tool_call_loop(*args, **kwargs)
        self._speculator.join_others(self.generation_config, self._tokenizer)
        return result

    @contextmanager
    def _whole_policy(self) -> Iterator[PreTrainedModel]:
        with (
            profiling_context(self, "spec_trl.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as wrapped,
            torch.no_grad(),
            whole_weights(wrapped) as policy,
            self.accelerator.autocast(),  # around the whole rollout, so that fp32 weights are cast once
        ):
            yield policy

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        adaptation = self._speculator.adaptation
        if adaptation is not None and self.args.should_save:  # before super may push the folder to the hub
            adaptation.save_drafter(output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and not self.args.save_only_model:  # a checkpoint
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            self._speculator.save(output_dir, is_shared=self.args.should_save)
