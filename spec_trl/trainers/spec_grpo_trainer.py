"""GRPOTrainer whose rollouts are speculative and token-identical to plain sampling."""

import copy
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation

from ..distributed.draft_ranks import DraftRanks
from ..distributed.link import naming_the_remedy
from ..distributed.shared_rollouts import Sampled, SharedRollouts, Turn
from ..drafter_training.adaptation import check_adaptation
from ..generation.drafters.history import HistoryDrafter
from ..generation.drafters.mtp.mtp_drafter import MtpDrafter
from ..generation.engine.attention import keeps_states
from ..generation.engine.parked_rows import ParkedRows
from ..generation.engine.requirements import policy_in
from ..generation.registry import CHOOSING
from ..generation.strategies import policy_copies
from ..measuring.machine import hardware_name
from .checkpoint import find_checkpoint
from .exact_logprobs import ExactLogprobs
from .rollout_memory import KeptGraphs, whole_weights
from .run_drafting import PROFILE_FILE, RunDrafting
from .run_log import LOG_FILE, CollapseAlarm, Mode, Record, RunHeader, RunLog, StepRecord, Verdict
from .sampler_mismatch import SamplerMismatch
from .saved_heads import adding_heads
from .spec_grpo_config import SpecGRPOConfig
from .step_totals import RolloutTotals, StepClock, metrics
from .trainer_checks import check_attributes, check_drawn, check_fsdp, check_methods, check_rollouts, check_text


class SpecGRPOTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with lossless speculative rollouts (EfficientRollout, Algorithm 1).

    The drafter follows the policy. In every decoding round the times of earlier rounds, and a calibrated roofline if
    there is one, decide whether to draft; a controller adapts the draft length to the block efficiency. Rollouts and
    steps are logged in `output_dir/rollout_log.jsonl`, which `spec-trl report` draws; `train` ends with a line that
    says whether drafting helped. With exact verification completions, losses and weights are those of
    `assistant_strategy="none"`. With a `rollout_func`, which generates by itself, nothing is drafted.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or `PeftModel`): the policy.
        reward_funcs: as in GRPOTrainer.
        args ([`SpecGRPOConfig`], *optional*): configuration.
        rest, kwargs: GRPOTrainer's other arguments.

    Raises:
        ValueError: `args` is no SpecGRPOConfig, or a rollout of this model under `args` would fail.
    """

    _tag_names = ["trl", "grpo", "spec_trl"]

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: SpecGRPOConfig | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if args is None:
            args = SpecGRPOConfig(output_dir="SpecGRPO")
        elif not isinstance(args, SpecGRPOConfig):
            raise ValueError(f"args is a {type(args).__name__}; SpecGRPOTrainer needs a SpecGRPOConfig.")
        check_methods(SpecGRPOTrainer, GRPOTrainer)
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        check_attributes(self)
        check_fsdp(self._dist.fsdp_version)
        adapts = args.drafter_adaptation
        try:
            check_adaptation(args.torch_compile, args.n_gpu, self._dist.zero_stage, self._dist.is_fsdp)
        except ValueError:
            if adapts and args.adaptable_drafters():
                raise
            adapts = False  # of a head that "auto" drafts with
        self._drafting = RunDrafting(args, self.accelerator, adapts)
        config = self._drafting.config
        processors = None if self.rollout_func is not None else check_rollouts(self, config)
        self._train_sampler: Any = ()
        # Number of rollouts by mode: an evaluation must not change the samples of training.
        self._rollouts = {"train": 0, "eval": 0}
        self._totals = RolloutTotals()
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self._draft_ranks = DraftRanks(args.draft_ranks, rank, ranks, args.ddp_timeout)
        shares, decoding = args.rollout_sharing == "pool", self._draft_ranks.decoding
        parked = ParkedRows() if self.tools and not keeps_states(policy_in(self.model).config) else None
        self._sharing = SharedRollouts(shares, rank, ranks, args.ddp_timeout, decoding, parked)
        self._alarm = CollapseAlarm(by_first_token=args.sd_toggle == "measured" or args.assistant_strategy in CHOOSING)
        in_place = self._dist.zero_stage != 3 and not self._dist.is_fsdp
        self._graphs = KeptGraphs(config.keep_graphs, self.accelerator.device, in_place)
        self._log: RunLog | None = None
        self._verdict = Verdict()
        self._mismatch = SamplerMismatch(self.accelerator, args, processors)
        self._exact = ExactLogprobs(self, config, processors) if args.exact_logprobs else None
        self._clock = StepClock(self.accelerator.device, self._log_step)
        self.add_callback(self._clock)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        # Before and after a run weights may be replaced without a step (resuming, a second run,
        # load_best_model_at_end).
        self._drafting.expect_new_weights()
        self._log = None  # a run writes a new header
        try:
            with naming_the_remedy(self.accelerator.process_index):
                result = super().train(find_checkpoint(resume_from_checkpoint, self.args.output_dir), *args, **kwargs)
        finally:
            self._drafting.expect_new_weights()
        if self.accelerator.is_main_process and self._verdict.rollouts:
            print(f"spec_trl verdict: {self._verdict}")
        return result

    # ---- a training step --------------------------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as watched:
            if self._drafting.activations is not None:  # AWQ: the next refresh scales by the inputs of projections
                watched.enter_context(self._drafting.activations.collect(self.state.global_step))
            if (adaptation := self._drafting.adaptation) is not None and self.model.training:
                watched.enter_context(adaptation.watch(inputs))  # a learned drafter learns from hidden states
            loss = super().compute_loss(model, self._mismatch.for_the_loss(inputs), *args, **kwargs)
        for name, value in self._mismatch.metrics(inputs).items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return loss

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._graphs.give_way(self.model):
            return super()._inner_training_loop(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        if (adaptation := self._drafting.adaptation) is not None:
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
            scores = score(*args, **kwargs)
        self._mismatch.forward = scores[0].detach()
        return scores

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> Any:
        mode: Mode = "train" if self.model.training else "eval"
        self._totals = RolloutTotals()
        self._sharing.begin()
        with self._clock.phase("rollout"), self._graphs.rollout(self.model, self.state.global_step):
            result = super()._generate(prompts)
        self._sharing.begin()  # drops what tool turns have parked
        if self.rollout_func is None:
            self._finish_rollout(mode)
        self._rollouts[mode] += 1
        return result

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *rest: Any, **more: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        check_text(images, multimodal_fields)
        check_drawn(policy_in(self.model), self.generation_config, prompt_ids, self._tokenizer)
        completions = self._take_turn(self._sharing.gather(prompt_ids))
        logprobs = [sampled.logprobs for sampled in completions]  # TRL puts zeros where tools answer, and pads
        return [sampled.tokens for sampled in completions], logprobs if self._mismatch.is_logged else None

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._tool_call_loop(*args, **kwargs)
        # Other ranks may still have tool calls. A turn needs all ranks: they gather weights, and may share rows.
        while self.accelerator.num_processes > 1 and (turn := self._sharing.gather([])).rows:
            self._take_turn(turn)
        return result

    def _take_turn(self, turn: Turn) -> list[Sampled]:
        """Takes part in a turn of all ranks; returns the completions of this rank's rows."""
        # Prompts are padded as on one rank, since some processors see the padding.
        padding, width = self._tokenizer.pad_token_id, max(map(len, turn.prompts))
        prompts = [turn.prompts[place] for place in turn.decoded]
        ids = [[padding] * (width - len(prompt)) + prompt for prompt in prompts]  # [B, width]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]  # [B, width]
        rows = self._sharing.rows_in_flight(turn, self.args.rollout_batch_size)
        generation_config = copy.copy(self.generation_config)
        generation_config.return_dict_in_generate = True  # deprecated as an argument next to a config
        decoded: dict[int, Sampled] = {}
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
            step, durations = self.state.global_step, self._totals.durations  # it counts only optimizer steps
            drafters, control = self._drafting.prepare(policy, step, rows, width, durations)
            started = time.perf_counter()
            if self._draft_ranks.drafts:
                self._draft_ranks.serve(drafters[0], self.accelerator.device, self._sharing.link())
                self._totals.durations.seconds += time.perf_counter() - started
            elif prompts:
                with self._draft_ranks.ahead(drafters) as drafting:
                    output = policy.generate(
                        input_ids=torch.tensor(ids, device=self.accelerator.device),
                        attention_mask=torch.tensor(mask, device=self.accelerator.device),
                        generation_config=generation_config,
                        tokenizer=self._tokenizer,  # for stop strings
                        assistant_strategy=self.args.assistant_strategy,
                        speculative_config=replace(self._drafting.config, max_batch_size=rows),
                        drafter=drafting,
                        request_ids=self._request_ids([turn.rows[place] for place in turn.decoded]),
                        control=control,
                        make_queue=self._sharing.make_queue(turn, rows),
                    )
                answers = zip(turn.decoded, output.sequences, output.logprobs, output.lengths.tolist(), strict=True)
                decoded = {
                    place: Sampled(row[width : width + count].tolist(), logprobs[:count].tolist())
                    for place, row, logprobs, count in answers
                    if count  # rows of other ranks are empty
                }
                seconds = time.perf_counter() - started
                self._totals.add(output.statistics, len(decoded), seconds, self._sharing.pool)
        self._totals.turns += 1
        for copied in policy_copies(drafters):
            self._totals.durations.refresh_seconds += copied.refresh_seconds
            copied.refresh_seconds = 0.0
        completions = self._sharing.exchange(turn, decoded)
        for drafter in drafters:
            if isinstance(drafter, HistoryDrafter):
                for place in completions.keys() - decoded.keys():
                    drafter.remember(turn.prompts[place], completions[place].tokens)
        return [completions[place] for place in turn.own]

    def _request_ids(self, rows: list[int]) -> list[int]:
        """Ids that key the noise of these global rows: (mode, rollout, turn of a tool loop, global row)."""
        mode = "train" if self.model.training else "eval"
        base = (mode == "eval") << 62 | self._rollouts[mode] << 36 | self._totals.turns << 24
        return [base | row for row in rows]

    # ---- after a rollout --------------------------------------------------------------------------------------------

    def _finish_rollout(self, mode: Mode) -> None:
        """Logs the rollout, and updates draft lengths."""
        drafting, strategy = self._drafting, self.args.assistant_strategy
        totals = self._totals.over_ranks([drafter.strategy for drafter in drafting.drafters])
        candidates = drafting.control.candidates if drafting.control is not None else ()
        draft_lengths = {candidate.name: candidate.draft_length for candidate in candidates}
        record = totals.record(mode, self._rollouts[mode], self.state.global_step, strategy, draft_lengths)
        has_copy, races = bool(policy_copies(drafting.drafters)), strategy == "best_of_n"
        for name, value in metrics(record, has_copy, races=races).items():
            self._metrics[mode][f"rollout/{name}"].append(value)
        if self.accelerator.is_main_process:
            self._append(record)
            drafting.keep_rounds()
        if mode == "train":
            self._alarm.add(record)
            drafting.observe({name: tally.block_efficiency for name, tally in totals.counts.tallies.items()})

    def _append(self, record: Record) -> None:
        """Appends to the run's log, after a header, and to the verdict."""
        if self._log is None:
            self._log, self._verdict = RunLog(Path(self.args.output_dir) / LOG_FILE), Verdict()
            header = RunHeader(
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                hardware=hardware_name(self.accelerator.device),
                model=self.model.config._name_or_path or type(self.model).__name__,
                dtype=str(self.model.dtype).removeprefix("torch."),
                strategy=self.args.assistant_strategy,
                settings=self.args.own_options(),
                profile=None if self._drafting.profile is None else str(Path(self.args.output_dir) / PROFILE_FILE),
                calibration_seconds=self._drafting.calibration_seconds,
            )
            self._drafting.calibration_seconds = 0.0
            self._append(header)
        self._log.append(record)
        self._verdict.add(record)

    def _log_step(self, step: int, seconds: float, phases: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            rewards = self._metrics["train"].get("reward")
            self._append(StepRecord(step, seconds, phases, rewards[-1] if rewards else None))

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if (adaptation := self._drafting.adaptation) is not None and self.args.should_save:
            adaptation.save_drafter(
                output_dir or self.args.output_dir
            )  # first: super may push the folder to the hub
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        policy = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        drafter = None if self._drafting.adaptation is None else self._drafting.adaptation.drafter
        heads: AbstractContextManager[None] = nullcontext()
        if self.args.should_save and isinstance(policy, PreTrainedModel):  # else an adapter is saved
            trained = drafter if isinstance(drafter, MtpDrafter) else None
            heads = adding_heads(policy, output_dir or self.args.output_dir, trained)
        with heads:
            super()._save(output_dir, state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The counters are our random state: saved with it, before old checkpoints go.
        self._drafting.save(output_dir, self._rollouts, is_shared=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:  # the sampler draws an order per epoch: skip those of earlier epochs
            for _ in range(int(self.state.epoch or 0)):
                next(iter(self._train_sampler), None)
            self._rollouts = self._drafting.load(checkpoint) or self._rollouts
