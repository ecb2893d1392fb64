"""The drafters of a run's rollouts and their control: made at the first rollout, refreshed with the policy, saved in
checkpoints. One rank measures profiles and ladders for all ranks."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from ..drafter_training.adaptation import STATE_FILE as ADAPTATION_FILE
from ..drafter_training.adaptation import Adaptable, DrafterAdaptation
from ..generation.drafters.history import HistoryDrafter
from ..generation.engine.drafter import Drafter
from ..generation.measuring import find_clock, find_ladder, find_profile, profile_key
from ..generation.planner.clock import Clock
from ..generation.planner.control import Control
from ..generation.planner.planner import Planner
from ..generation.registry import CHOOSING
from ..generation.session import Session, structure
from ..generation.strategies import copy_again, make_control, make_drafters, policy_copies
from ..papers import load
from ..papers.test_time_speculation.distilled_drafter import DistilledDrafter
from ..quantization.awq import ActivationStatistics
from ..random_state import keeping_generators
from .checkpoint import DraftLengthState, RankState, RolloutState, only_for_speed
from .rollout_options import RolloutOptions
from .step_totals import Durations


if TYPE_CHECKING:
    from ..papers.efficient_rollout.draft_length import DraftLengthController
    from ..papers.efficient_rollout.profile import Profile
    from ..papers.specactor.ladder import Ladder


T = TypeVar("T")
PROFILE_FILE = "roofline_profile.json"
"""Path of the profile's copy in the run's `output_dir`; the ladder's copy is next to it."""


class RunDrafting:
    """The drafters of a run and their control.

    Args:
        args: of the run.
        accelerator: of the run.
        adapts: whether a learned drafter is trained along.
    """

    def __init__(self, args: RolloutOptions, accelerator: Accelerator, adapts: bool) -> None:
        self._args, self._accelerator, self._adapts = args, accelerator, adapts
        self.config = args.speculative_config()
        self.drafters: list[Drafter] = []
        self.control: Control | None = None
        self.adaptation: DrafterAdaptation | None = None
        self.activations: ActivationStatistics | None = None  # for AWQ
        self.profile: Profile | None = None
        self.calibration_seconds = 0.0  # of a profile, a ladder or a probe; not yet logged
        self._clock: Clock | None = None
        self._draft_lengths: dict[str, DraftLengthController] = {}  # by strategy
        self._copied: tuple[object, ...] = ()  # structure of the policy that copies were made of; (): no copy was made
        self._drafted_step = -1
        self._saved_lengths: dict[str, DraftLengthState] = {}
        self._saved = RankState({}, None)
        self._resumed_from: Path | None = None

    @keeping_generators()
    def prepare(
        self, policy: PreTrainedModel, step: int, rows: int, width: int, durations: Durations
    ) -> tuple[list[Drafter], Control]:
        """Returns drafters and control of a turn after `step` optimizer steps, with `rows` rows in flight of prompts
        of `width` tokens. The first call makes both, and may probe or calibrate. `durations` counts making drafters as
        setup. All ranks must call it."""
        structure_now = structure(policy)
        if not self._copied:
            started = time.perf_counter()
            self._make_drafters(policy)
            self._drafted_step = step
            making = time.perf_counter() - started
            durations.setup_seconds += making
        elif structure_now != self._copied:  # other adapters are active, merged or scaled now
            copy_again(self.drafters, policy, self.config)
            self._watch_activations(policy)
        self._copied = structure_now
        control = self._current_control(policy, rows, width)
        if self._drafted_step != step:  # new weights: requantize when it drafts (ER Algorithm 1, line 3)
            for copied in policy_copies(self.drafters):
                copied.refresh_before_drafting(self.activations)
            self._drafted_step = step
        return self.drafters, control

    def expect_new_weights(self) -> None:
        """Called when the policy's weights may have changed without an optimizer step."""
        self._drafted_step = -1

    def _make_drafters(self, policy: PreTrainedModel) -> None:
        args, strategy = self._args, self._args.assistant_strategy
        strategy, assistant = ("none", None) if args.sd_toggle == "never" else (strategy, args.assistant_model)
        with Session.lend(policy) as session:
            self.drafters = make_drafters(session, strategy, policy, assistant, self.config)
            for drafter in self.drafters:  # from now on only the trainer uses them
                session.drafters.pop(drafter.strategy, None)
        names = [drafter.strategy for drafter in self.drafters]
        self._draft_lengths = args.draft_length_controllers(names, self._saved_lengths)
        for drafter in self.drafters:
            memory = self._saved.memories.pop(drafter.strategy, None)
            if isinstance(drafter, HistoryDrafter | DistilledDrafter) and memory is not None:
                drafter.load_state_dict(memory)
            if isinstance(drafter, Adaptable) and self._adapts:
                self.adaptation = DrafterAdaptation(
                    drafter, policy, self._accelerator, args.drafter_learning_rate, args.drafter_hidden_weight,
                    args.drafter_token_weight, args.seed, args.choice_of_draft_lengths()[-1],
                )  # fmt: skip
                if self._resumed_from is not None:
                    with only_for_speed(self._resumed_from / ADAPTATION_FILE):
                        self.adaptation.load_state(self._resumed_from)
        self._watch_activations(policy)

    def _watch_activations(self, policy: PreTrainedModel) -> None:
        for copied in policy_copies(self.drafters):
            if names := copied.quantized.activation_aware_layers:
                self.activations = ActivationStatistics(policy, names)

    def _current_control(self, policy: PreTrainedModel, rows: int, width: int) -> Control:
        """Returns the control, made at the first rollout, with the current γ and τ_prev (ER Algorithm 1, lines
        6-8)."""
        args, is_new = self._args, self.control is None
        steps = getattr(args, "steps_per_generation", args.gradient_accumulation_steps)  # distillation has no choice
        rows = max(rows, args.per_device_train_batch_size * steps)
        rows = min(args.rollout_batch_size or rows, rows)  # most rows in flight, in this or a later rollout
        if self.control is None:
            self.control = self._make_control(policy, rows, width + args.max_completion_length)
        if not isinstance(self.control, Planner):  # which chooses γ by itself
            for candidate in self.control.candidates:
                controller = self._draft_lengths[candidate.name]
                candidate.draft_length = controller.draft_length
                candidate.block_efficiency = controller.block_efficiency
        if is_new and self.drafters and self._accelerator.is_main_process:
            forecast = self.control.forecast(rows, width + args.max_completion_length / 2)
            what = "calibration" if self.profile else "a first probe of this machine"
            took = f" ({what} took {self.calibration_seconds:.0f} s)" if self.calibration_seconds >= 1 else ""
            print(f"spec_trl rollouts: {forecast.reason}{took}")
        return self.control

    def _make_control(self, policy: PreTrainedModel, rows: int, length: int) -> Control:
        """Makes the control for at most `rows` rows in flight, of `length` tokens, prompt and completion."""
        started, args, config, ladder = time.perf_counter(), self._args, self.config, None
        lengths = args.choice_of_draft_lengths()
        if self.drafters and args.sd_toggle in ("measured", "roofline"):
            self.profile = self._find_profile(policy, rows, length)
            if args.assistant_strategy in CHOOSING:
                ladder = self._on_one_rank(lambda: self._find_ladder(policy, rows, lengths))
        if not self.profile and not ladder:
            self._clock = find_clock(policy, self.drafters, config, args.draft_ranks)
        control = make_control(self.drafters, config, lengths, self.profile, ladder, self._clock)
        if isinstance(control, Planner) and self._saved.ledger is not None:
            control.load_state_dict(self._saved.ledger)
            if self._clock is not None:  # a checkpoint may come from another machine
                self._clock.saved = self._clock.rounds
        self.calibration_seconds += time.perf_counter() - started
        return control

    # ---- measurements of one rank -------------------------------------------------------------------------------

    def _find_profile(self, policy: PreTrainedModel, rows: int, length: int) -> "Profile | None":
        """Returns the roofline profile, stored or measured; None: measured rounds decide."""
        copy_to = Path(self._args.output_dir) / PROFILE_FILE
        profile = self._on_one_rank(lambda: find_profile(policy, self.config, rows, length, copy_to))
        if profile is not None and profile.key != profile_key(policy, self.config):
            # A named profile belongs to the device of rank 0.
            profile = find_profile(policy, replace(self.config, roofline_profile=None), rows, length)
        return profile

    def _find_ladder(self, policy: PreTrainedModel, rows: int, lengths: tuple[int, ...]) -> "Ladder | None":
        """Returns the draft ladder, stored or profiled, or None."""
        ladder = find_ladder(policy, self.drafters, self.config, rows, lengths)
        if ladder is not None:
            ladder.save(load("papers.specactor.ladder").ladder_path(Path(self._args.output_dir) / PROFILE_FILE))
        return ladder

    def _on_one_rank(self, measure: Callable[[], T]) -> T:
        """Returns on all ranks the result of `measure` on one rank: several ranks at once would disturb the times."""
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

    # ---- from rollout to rollout ------------------------------------------------------------------------------------

    def keep_rounds(self) -> None:
        """Stores this machine's times of rounds for later runs."""
        if self._clock is not None:
            self._clock.keep()

    def observe(self, block_efficiencies: Mapping[str, float | None]) -> None:
        """Updates γ and τ_prev by strategy after a training rollout (ER Algorithm 1, lines 14-20)."""
        if not isinstance(self.control, Planner):
            for name, controller in self._draft_lengths.items():
                controller.observe(block_efficiencies[name])

    def save(self, folder: str, rollouts: dict[str, int], is_shared: bool) -> None:
        """Writes this rank's state to a checkpoint, and that of all ranks where this rank `is_shared`'s writer."""
        if is_shared:
            now = {name: DraftLengthState(**one.state_dict()) for name, one in self._draft_lengths.items()}
            RolloutState(rollouts, now or self._saved_lengths).save(folder)
            if self.adaptation is not None:
                self.adaptation.save_state(folder)
        learning = (one for one in self.drafters if isinstance(one, HistoryDrafter | DistilledDrafter))
        memories = {drafter.strategy: memory for drafter in learning if (memory := drafter.state_dict())}
        ledger = self.control.state_dict() if isinstance(self.control, Planner) else self._saved.ledger
        RankState(memories, ledger).save(folder, self._accelerator.process_index)

    def load(self, folder: str) -> dict[str, int] | None:
        """Restores a checkpoint at the next rollout; returns the number of rollouts by mode, or None if it lacks
        it."""
        state = RolloutState.load(folder)
        if state is None:
            return None
        saved = RankState.load(folder, self._accelerator.process_index)
        # "tts" warns about an empty state.
        self._saved = RankState({DistilledDrafter.strategy: {}, **saved.memories}, saved.ledger)
        self._saved_lengths, self._resumed_from = state.draft_lengths, Path(folder)
        self.drafters, self._copied, self.control, self.adaptation = [], (), None, None
        return state.rollouts
