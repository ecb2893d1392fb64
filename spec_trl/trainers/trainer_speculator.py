"""Samples rollouts on all ranks for our trainers, with drafters that follow the policy. One rank measures profiles and
ladders for all ranks."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..distributed.shared_rollouts import Sampled, SharedRollouts, Turn
from ..drafter_training.adaptation import ADAPTABLE, Adaptable, AdaptationOptions, DrafterAdaptation
from ..drafter_training.adaptation import STATE_FILE as ADAPTATION_FILE
from ..generation.drafters.history import HistoryDrafter
from ..generation.engine.drafter import Drafter
from ..generation.engine.network.snapshot import structure
from ..generation.engine.parked_rows import ParkedRows
from ..generation.engine.sampling.noise import keeping_generators
from ..generation.measuring import find_clock, find_ladder, find_profile, profile_key
from ..generation.options import SpeculativeConfig
from ..generation.planner.clock import Clock
from ..generation.planner.control import Control
from ..generation.planner.planner import Planner
from ..generation.registry import CHOOSING
from ..generation.session import Session
from ..generation.strategies import copy_again, make_control, make_drafters, policy_copies
from ..hardware import hardware_name
from ..papers import Calibration, load
from ..quantization.awq import ActivationStatistics
from .certificate import Certificate
from .checkpoint import DraftLengthState, RankState, RolloutState, only_for_speed
from .rollout_options import RolloutOptions
from .run_log import Mode, RolloutRecord, RunHeader
from .run_verdict import CollapseAlarm
from .speculator import Speculator
from .step_totals import metrics


T = TypeVar("T")
PROFILE_FILE = "roofline_profile.json"
"""Path of the profile's copy in the run's `output_dir`; the ladder's copy is next to it."""


def draft_length_controllers(
    config: SpeculativeConfig, strategies: Sequence[str], saved: Mapping[str, DraftLengthState]
) -> dict[str, Any]:
    """A :class:`~.DraftLengthController` by strategy: where a checkpoint `saved` it, or at its start. None where a
    planner chooses γ in each round."""
    controllers: dict[str, Any] = {}
    options = config.efficient_rollout
    for name in strategies if config.sd_toggle in ("always", "roofline") else ():
        controllers[name] = load("papers.efficient_rollout.draft_length").DraftLengthController(
            config.draft_lengths, config.first_draft_length, options.draft_length_up, options.draft_length_down,
            options.draft_length_patience,
        )  # fmt: skip
        if name in saved:
            controllers[name].load_state_dict(vars(saved[name]))
    return controllers


class TrainerSpeculator(Speculator):
    """Samples the rollouts of a training: `begin`, a `rollout` for each turn, `finish`. All ranks call each.

    Args:
        weights: entered for a turn; yields the policy with whole weights, under the autocast of the training.
        adapts: whether a learned drafter is trained along.
        parks: whether rollouts may have several turns, with K/V of rows stored in between.
        not_compared: see :class:`RunHeader`.
        keep_supports: whether to store the tokens that the processors kept.

    Attributes:
        supports: of this rank's rows in the newest rollout, by global row.
        drafters: made at the first rollout.
        adaptation: of a learned drafter; None: none is trained along.
        activations: inputs of projections, for AWQ.
    """

    def __init__(
        self,
        args: RolloutOptions,
        accelerator: Accelerator,
        weights: Callable[[], AbstractContextManager[PreTrainedModel]],
        adapts: bool,
        parks: bool,
        not_compared: str | None,
        keep_supports: bool,
    ) -> None:
        folder = args.output_dir if accelerator.is_main_process else None
        config = args.rollout_config()
        super().__init__(args.assistant_strategy, config, folder)
        if folder is not None:
            self.certificate = Certificate(folder, accelerator.mixed_precision)
        self._not_compared, self._keep_supports = not_compared, keep_supports
        self.supports: dict[int, list[tuple[int, Tensor]]] = {}
        rank, ranks = accelerator.process_index, accelerator.num_processes
        self._args, self._accelerator, self._weights, self._adapts = args, accelerator, weights, adapts
        self._draft_ranks, decoding = None, ranks
        if count := config.specactor.draft_ranks:
            make = load("papers.specactor.draft_ranks").DraftRanks
            self._draft_ranks = make(count, rank, ranks, args.ddp_timeout)
            decoding = self._draft_ranks.decoding
        shares = args.rollout_sharing == "pool"
        self._parked = ParkedRows() if parks else None
        several_chains = args.assistant_strategy == "best_of_n"
        self._sharing = SharedRollouts(shares, rank, ranks, args.ddp_timeout, decoding, self._parked, several_chains)
        measured = config.sd_toggle == "measured"
        self._alarm = CollapseAlarm(by_first_token=measured or args.assistant_strategy in CHOOSING)
        self.drafters: list[Drafter] = []
        self.adaptation: DrafterAdaptation | None = None
        self.activations: ActivationStatistics | None = None
        self._control: Control | None = None
        self._profile: Calibration = None
        self._calibration_seconds = 0.0  # of a profile, a ladder or a probe; not yet logged
        self._clock: Clock | None = None
        self._draft_lengths: dict[str, Any] = {}  # by strategy
        self._copied: tuple[object, ...] = ()  # structure of the policy that copies were made of; (): no copy was made
        self._is_stale = False  # the weights have changed since the last turn
        self._saved_lengths: dict[str, DraftLengthState] = {}
        self._saved = RankState({}, None)
        self._resumed_from: Path | None = None

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def begin(self, mode: Mode, step: int) -> None:
        self._begin(mode, step)
        self._sharing.begin()
        self.supports = {}

    def refresh(self) -> None:
        self._is_stale = True  # a copy is requantized when it drafts (ER Algorithm 1, line 3)

    def rollout(
        self,
        prompts: list[list[int]],
        generation_config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        media: Mapping[str, Any] | None = None,
    ) -> list[Sampled]:
        """Takes a turn of all ranks; returns the completions of this rank's prompts.

        Args:
            prompts: token ids, possibly of no prompt. Rows of prompts with media stay on their rank, and so do those
                of other ranks in this turn.
            generation_config: of the rollout.
            tokenizer: pads, and reads stop strings.
            media: inputs of `generate` for these prompts (:func:`~.media_inputs`).
        """
        turn = self._sharing.gather(prompts, have_media=bool(media))
        return self._take(turn, generation_config, tokenizer, media)

    def join_others(self, generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Takes part in further turns until no rank has prompts: all ranks gather weights in a turn, and may share
        rows."""
        while self._accelerator.num_processes > 1 and (turn := self._sharing.gather([])).rows:
            self._take(turn, generation_config, tokenizer)

    def _take(
        self,
        turn: Turn,
        generation_config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        media: Mapping[str, Any] | None = None,
    ) -> list[Sampled]:
        with self._weights() as policy:
            decoded = self._decode(policy, turn, generation_config, tokenizer, media)
        completions = self._sharing.exchange(turn, decoded)
        for drafter in self.drafters:
            if isinstance(drafter, HistoryDrafter):
                for place in completions.keys() - decoded.keys():
                    drafter.remember(turn.prompts[place], completions[place].tokens)
        for place in turn.own:
            if (support := completions[place].support) is not None:
                self.supports.setdefault(turn.rows[place], []).append((len(turn.prompts[place]), support))
        return [completions[place] for place in turn.own]

    def _decode(
        self,
        policy: PreTrainedModel,
        turn: Turn,
        generation_config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        media: Mapping[str, Any] | None,
    ) -> dict[int, Sampled]:
        # Prompts are padded as on one rank, since some processors see the padding.
        padding, width = tokenizer.pad_token_id, max(map(len, turn.prompts))
        prompts = [turn.prompts[place] for place in turn.decoded]
        rows, device = self._sharing.rows_in_flight(turn, self._config.max_batch_size), self._accelerator.device
        generation_config = copy.copy(generation_config)
        generation_config.return_dict_in_generate = True  # deprecated as an argument next to a config
        decoded: dict[int, Sampled] = {}

        def padded(texts: Sequence[Sequence[int]], value: int) -> Tensor:
            return torch.tensor([[value] * (width - len(text)) + list(text) for text in texts], device=device)

        control = self._prepare(policy, rows, width)
        started = time.perf_counter()
        if self._draft_ranks is not None and self._draft_ranks.drafts:
            self._draft_ranks.serve(self.drafters[0], device, self._sharing.link())
            self._sums.longest["seconds"] += time.perf_counter() - started
        elif prompts:
            ahead = nullcontext if self._draft_ranks is None else self._draft_ranks.ahead
            with ahead(self.drafters) as drafting:
                output = policy.generate(
                    input_ids=padded(prompts, padding),  # [B, width]
                    attention_mask=padded([[1] * len(prompt) for prompt in prompts], 0),
                    **{
                        name: value.to(device) if isinstance(value, Tensor) else padded(value, 0)
                        for name, value in (media or {}).items()
                    },
                    generation_config=generation_config,
                    tokenizer=tokenizer,
                    assistant_strategy=self._args.assistant_strategy,
                    speculative_config=replace(self._config, max_batch_size=rows),
                    drafter=drafting,
                    request_ids=self._request_ids([turn.rows[place] for place in turn.decoded]),
                    control=control,
                    make_queue=self._sharing.make_queue(turn, rows),
                    keep_supports=self._keep_supports,
                )
            lengths = output.lengths.tolist()
            answers = zip(turn.decoded, output.sequences, output.logprobs, lengths, output.supports, strict=True)
            decoded = {
                place: Sampled(row[width : width + count].tolist(), logprobs[:count].tolist(), support)
                for place, row, logprobs, count, support in answers
                if count  # rows of other ranks are empty
            }
            seconds = time.perf_counter() - started
            self._sums.add(output.statistics, len(decoded), seconds, self._sharing.pool)
        self._sums.turns += 1
        self._sums.add_refreshes(self.drafters)
        return decoded

    def _request_ids(self, rows: list[int]) -> list[int]:
        """Ids that key the noise of these global rows: (mode, rollout, turn of a tool loop, global row)."""
        base = (self._mode == "eval") << 62 | self.counts[self._mode] << 36 | self._sums.turns << 24
        return [base | row for row in rows]

    def finish(self, model: Any) -> dict[str, float]:
        """Logs the rollout of `model`, which may be wrapped by peft, and updates γ and τ_prev (ER Algorithm 1, lines
        14-20); returns TRL's metrics."""
        if self._parked is not None:
            self._parked.clear()
        self._sums.over_ranks([drafter.strategy for drafter in self.drafters])
        candidates = self._control.candidates if self._control is not None else ()
        draft_lengths = {candidate.name: candidate.draft_length for candidate in candidates}
        record, logged = self._finish(model, self.drafters, draft_lengths)
        if self._clock is not None and self._accelerator.is_main_process:
            self._clock.keep()
        if self._mode == "train":
            self._alarm.add(record)
            if not isinstance(self._control, Planner):
                for name, controller in self._draft_lengths.items():
                    controller.observe(self._sums.summed["tallies"][name].block_efficiency)
        return logged

    def log_rollout(self, model: Any, record: RolloutRecord) -> dict[str, float]:
        """Logs a rollout of another engine; returns TRL's metrics."""
        self._append(record, model)
        return metrics(record, record.strategy == "self", several_chains=False)

    def _header(self, policy: Any, **more: Any) -> RunHeader:
        seconds, self._calibration_seconds = self._calibration_seconds, 0.0
        profile = None if self._profile is None else str(Path(self._args.output_dir) / PROFILE_FILE)
        return super()._header(
            policy, hardware=hardware_name(self._accelerator.device), settings=self._args.settings(),
            profile=profile, calibration_seconds=seconds, not_compared=self._not_compared, **more,
        )  # fmt: skip

    # ---- drafters and control ---------------------------------------------------------------------------------------

    @keeping_generators()
    def _prepare(self, policy: PreTrainedModel, rows: int, width: int) -> Control:
        """Makes or refreshes the drafters for a turn with `rows` rows in flight, of prompts of `width` tokens; returns
        their control, with the current γ and τ_prev (ER Algorithm 1, lines 6-8). The first call may probe or
        calibrate."""
        args, is_new, structure_now = self._args, self._control is None, structure(policy)
        if not self._copied:
            started = time.perf_counter()
            self._make_drafters(policy, args.assistant_strategy)
            self._is_stale = False
            self._sums.longest["setup_seconds"] += time.perf_counter() - started
        elif structure_now != self._copied:  # other adapters are active, merged or scaled now
            copy_again(self.drafters, policy, self._config)
            self._watch_activations(policy)
        self._copied = structure_now
        steps = getattr(args, "steps_per_generation", args.gradient_accumulation_steps)  # distillation has no choice
        rows = max(rows, args.per_device_train_batch_size * steps)
        rows = min(self._config.max_batch_size or rows, rows)  # most rows in flight, in this or a later rollout
        if self._control is None:
            self._control = self._make_control(policy, rows, width + args.max_completion_length)
        if not isinstance(self._control, Planner):  # a planner chooses γ
            for candidate in self._control.candidates:
                controller = self._draft_lengths[candidate.name]
                candidate.draft_length = controller.draft_length
                candidate.block_efficiency = controller.block_efficiency
        if is_new and self.drafters and self._accelerator.is_main_process:
            forecast = self._control.forecast(rows, width + args.max_completion_length / 2)
            what = "calibration" if self._profile else "a first probe of this machine"
            took = f" ({what} took {self._calibration_seconds:.0f} s)" if self._calibration_seconds >= 1 else ""
            print(f"spec_trl rollouts: {forecast.reason}{took}")
        if self._is_stale:
            for copied in policy_copies(self.drafters):
                copied.refresh_before_drafting(self.activations)
            self._is_stale = False
        return self._control

    def trained_along(self, policy: PreTrainedModel, strategy: str) -> Mapping[str, Tensor]:
        """Tensors of the drafter of `strategy` that is trained along for another engine; empty: none is."""
        if self._adapts and strategy in ADAPTABLE and not self.drafters:
            self._make_drafters(policy, strategy)
        return {} if self.adaptation is None else self.adaptation.drafter.tensors()

    def _make_drafters(self, policy: PreTrainedModel, strategy: str) -> None:
        args = self._args
        strategy, assistant = ("none", None) if self._config.sd_toggle == "never" else (strategy, args.assistant_model)
        with Session.lend(policy) as session:
            self.drafters = make_drafters(session, strategy, policy, assistant, self._config)
            for drafter in self.drafters:  # from now on only the trainer uses them
                session.drafters.pop(drafter.strategy, None)
        names = [drafter.strategy for drafter in self.drafters]
        self._draft_lengths = draft_length_controllers(self._config, names, self._saved_lengths)
        for drafter in self.drafters:
            memory = self._saved.memories.pop(drafter.strategy, None)
            if memory is not None or (self._resumed_from is not None and drafter.learns):
                drafter.load_state_dict(memory or {})  # a drafter that learns warns about an empty state
            if isinstance(drafter, Adaptable) and self._adapts:
                longest, how = self._config.choice_of_draft_lengths()[-1], args.adaptation or AdaptationOptions()
                self.adaptation = DrafterAdaptation(drafter, policy, self._accelerator, how, args.seed, longest)
                if self._resumed_from is not None:
                    with only_for_speed(self._resumed_from / ADAPTATION_FILE):
                        self.adaptation.load_state(self._resumed_from)
        self._watch_activations(policy)

    def _watch_activations(self, policy: PreTrainedModel) -> None:
        for copied in policy_copies(self.drafters):
            if names := copied.quantized.activation_aware_layers:
                self.activations = ActivationStatistics(policy, names)

    def _make_control(self, policy: PreTrainedModel, rows: int, length: int) -> Control:
        """Makes the control for at most `rows` rows in flight, of `length` tokens, prompt and completion."""
        started, args, config, ladder = time.perf_counter(), self._args, self._config, None
        lengths, copy_to = config.choice_of_draft_lengths(), Path(args.output_dir) / PROFILE_FILE
        if self.drafters and config.sd_toggle in ("measured", "roofline"):
            profile = self._on_one_rank(lambda: find_profile(policy, config, rows, length, copy_to))
            if profile is not None and profile.key != profile_key(policy, config):
                # A named profile belongs to the device of rank 0.
                unnamed = replace(config, efficient_rollout=replace(config.efficient_rollout, profile=None))
                profile = find_profile(policy, unnamed, rows, length)
            self._profile = profile
            if args.assistant_strategy in CHOOSING:
                ladder = self._on_one_rank(lambda: self._find_ladder(policy, rows, lengths))
        if not self._profile and not ladder:
            self._clock = find_clock(policy, self.drafters, config)
        several_chains = args.assistant_strategy == "best_of_n"
        control = make_control(self.drafters, config, lengths, self._profile, ladder, self._clock, several_chains)
        if isinstance(control, Planner) and self._saved.ledger is not None:
            control.load_state_dict(self._saved.ledger)
            if self._clock is not None:  # a checkpoint may come from another machine
                self._clock.saved = self._clock.rounds
        self._calibration_seconds += time.perf_counter() - started
        return control

    def _find_ladder(self, policy: PreTrainedModel, rows: int, lengths: tuple[int, ...]) -> Calibration:
        """Returns the draft ladder, stored or profiled, or None."""
        ladder = find_ladder(policy, self.drafters, self._config, rows, lengths)
        if ladder is not None:
            ladder.save(load("papers.specactor.ladder").ladder_path(Path(self._args.output_dir) / PROFILE_FILE))
        return ladder

    def _on_one_rank(self, measure: Callable[[], T]) -> T:
        """Returns on all ranks the result of `measure` on one rank: several at once would disturb the times."""
        result: list[Any] = [None]
        if self._accelerator.is_main_process:
            try:
                result[0] = measure()
            except Exception as error:  # raised on all ranks, else other ranks would wait for ever
                result[0] = error
        broadcast_object_list(result)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str, is_shared: bool) -> None:
        """Writes this rank's state to a checkpoint, and the state of all ranks if this rank writes it
        (`is_shared`)."""
        if is_shared:
            now = {name: DraftLengthState(**one.state_dict()) for name, one in self._draft_lengths.items()}
            RolloutState(self.counts, now or self._saved_lengths).save(folder)
            if self.adaptation is not None:
                self.adaptation.save_state(folder)
        if self.certificate is not None:
            self.certificate.write()
        memories = {drafter.strategy: memory for drafter in self.drafters if (memory := drafter.state_dict())}
        ledger = self._control.state_dict() if isinstance(self._control, Planner) else self._saved.ledger
        RankState(memories, ledger).save(folder, self._accelerator.process_index)

    def load(self, folder: str) -> None:
        """Restores a checkpoint at the next rollout, even without our state."""
        if (state := RolloutState.load(folder)) is None:
            return
        self._saved = RankState.load(folder, self._accelerator.process_index)
        self._saved_lengths, self._resumed_from = state.draft_lengths, Path(folder)
        self.counts, self.drafters, self._copied, self._control, self.adaptation = state.rollouts, [], (), None, None
