"""What our trainers override of TRL's on-policy trainers, so that rollouts are speculative."""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ..distributed.link import naming_the_remedy
from ..distributed.shared_rollouts import Sampled, Turn
from ..generation.engine.requirements import policy_in
from ..generation.refusals import NOT_ADAPTED
from .checkpoint import find_checkpoint
from .exact_logprobs import ExactLogprobs
from .prompt_images import image_inputs
from .rollout_memory import KeptGraphs, whole_weights
from .rollout_options import RolloutOptions
from .rollouts import Rollouts
from .run_log import Mode, StepRecord
from .saved_heads import head_of, keep_heads
from .step_totals import StepClock
from .trainer_checks import asked, check_attributes, check_drawn, check_methods, check_trainer


if TYPE_CHECKING:
    from trl import GRPOTrainer as TrainerOfTRL
else:
    TrainerOfTRL = object


class SpeculativeRollouts(TrainerOfTRL):
    """Stands before a trainer of TRL that samples in `_generate_single_turn` among the base classes of a trainer, and
    has each of its rollouts sampled by :class:`Rollouts`.

    Args:
        model: the policy.
        learned_from: second argument of TRL's trainer.
        args: None: the default config.
        rest, kwargs: its other arguments.

    Attributes:
        config_class: of `args`.
        lacking: methods and attributes that TRL's trainer lacks, and that no rollout needs.

    Raises:
        ValueError: `args` is no `config_class`, or a rollout of this model under `args` would fail.
    """

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
        super().__init__(model, learned_from, args, *rest, **kwargs)
        check_attributes(self, theirs, self.lacking)
        config = args.speculative_config()
        features = asked(self, config)
        self._processors = check_trainer(self, config, features)
        adapts = args.drafter_adaptation and not any(features[name] for name in NOT_ADAPTED)
        self._rollouts = Rollouts(args, self.accelerator, adapts, parks=bool(getattr(self, "tools", None)))
        self._train_sampler: Any = ()
        in_place = self._dist.zero_stage != 3 and not self._dist.is_fsdp
        self._graphs = KeptGraphs(config.keep_graphs, self.accelerator.device, in_place)
        self._exact = ExactLogprobs(self, config, self._processors) if args.exact_logprobs else None
        self._clock = StepClock(self.accelerator.device, self._log_step)
        self.add_callback(self._clock)
        drafting = ref(self._rollouts.drafting)
        keep_heads(policy_in(self.model), lambda: head_of(() if (one := drafting()) is None else one.drafters))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        # Before and after a run weights may be replaced without a step (resuming, a second run,
        # load_best_model_at_end).
        self._rollouts.expect_new_run()
        try:
            with naming_the_remedy(self.accelerator.process_index):
                result = super().train(find_checkpoint(resume_from_checkpoint, self.args.output_dir), *args, **kwargs)
        finally:
            self._rollouts.drafting.expect_new_weights()
        if self.accelerator.is_main_process and self._rollouts.records.verdict.rollouts:
            print(f"spec_trl verdict: {self._rollouts.records.verdict}")
        return result

    # ---- a training step --------------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        drafting = self._rollouts.drafting
        with ExitStack() as watched:
            if drafting.activations is not None:  # AWQ: the next refresh scales by the inputs of projections
                watched.enter_context(drafting.activations.collect(self.state.global_step))
            if drafting.adaptation is not None and self.model.training:
                watched.enter_context(drafting.adaptation.watch(inputs))  # a drafter learns from hidden states
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._graphs.give_way(self.model):
            return super()._inner_training_loop(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if (adaptation := self._rollouts.drafting.adaptation) is not None:
            with self._clock.phase("adaptation"):  # the backward pass has freed the memory of the forward
                adaptation.update()
            if self.accelerator.sync_gradients:
                for name, value in adaptation.take_metrics().items():
                    self._metrics["train"][f"drafter/{name}"].append(value)
        return loss

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self._clock.phase("prepare"):
            return super()._prepare_inputs(generation_batch)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock.phase("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        score = self._exact or super()._get_per_token_logps_and_entropies
        with self._clock.phase("logprobs") if not torch.is_grad_enabled() else nullcontext():
            return score(*args, **kwargs)

    def _log_step(self, step: int, seconds: float, phases: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            rewards = self._metrics["train"].get("reward")
            record = StepRecord(step, seconds, phases, rewards[-1] if rewards else None)
            self._rollouts.append(record, self.model)

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        mode: Mode = "train" if self.model.training else "eval"
        step = self.state.global_step  # it counts only optimizer steps
        self._rollouts.begin(mode, step)
        with self._clock.phase("rollout"), self._graphs.rollout(self.model, step):
            result = super()._generate(prompts)
        if getattr(self, "rollout_func", None) is None:  # else it generates by itself
            for name, value in self._rollouts.finish(self.model).items():
                self._metrics[mode][f"rollout/{name}"].append(value)
        self._rollouts.counts[mode] += 1
        return result

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        return [sampled.tokens for sampled in self._sample(prompt_ids, images, multimodal_fields)]

    def _sample(self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any]) -> list[Sampled]:
        policy, has_tools = policy_in(self.model), bool(getattr(self, "tools", None))
        inputs = image_inputs(images, multimodal_fields, policy, self.args, has_tools)
        check_drawn(policy, self.generation_config, prompt_ids, self._tokenizer)
        return self._take_turn(self._rollouts.gather(prompt_ids, have_images=bool(inputs)), inputs)

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._tool_call_loop(*args, **kwargs)
        # Other ranks may still have tool calls. A turn needs all ranks: they gather weights, and may share rows.
        while self.accelerator.num_processes > 1 and (turn := self._rollouts.gather([])).rows:
            self._take_turn(turn)
        return result

    def _take_turn(self, turn: Turn, images: Mapping[str, Any] | None = None) -> list[Sampled]:
        """Takes part in a turn of all ranks, with the `images` of this rank's rows; returns their completions."""
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
            decoded = self._rollouts.decode(policy, turn, self.generation_config, self._tokenizer, images)
        return self._rollouts.exchange(turn, decoded)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        adaptation = self._rollouts.drafting.adaptation
        if adaptation is not None and self.args.should_save:  # before super, which may push the folder to the hub
            adaptation.save_drafter(output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The counters are our random state: saved with it, before old checkpoints go.
        self._rollouts.save(output_dir, is_shared=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:  # the sampler draws an order per epoch: skip those of earlier epochs
            for _ in range(int(self.state.epoch or 0)):
                next(iter(self._train_sampler), None)
            self._rollouts.load(checkpoint)
