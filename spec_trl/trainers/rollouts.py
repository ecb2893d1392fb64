"""The speculative rollouts of a run. A trainer hands in its policy and prompts, and gets completions."""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..distributed.shared_rollouts import Sampled, SharedRollouts, Turn
from ..generation.drafters.history import HistoryDrafter
from ..generation.engine.parked_rows import ParkedRows
from ..generation.registry import CHOOSING
from ..generation.strategies import policy_copies
from ..papers.specactor.draft_ranks import DraftRanks
from .rollout_options import RolloutOptions
from .run_drafting import PROFILE_FILE, RunDrafting
from .run_log import Mode, Record, RunHeader
from .run_records import RunRecords, describe
from .run_verdict import CollapseAlarm
from .step_totals import RolloutTotals, metrics


class Rollouts:
    """Samples the rollouts of a run, and logs them.

    A rollout is `begin`, then for each turn of all ranks `gather`, `decode` and `exchange`, then `finish`.

    Args:
        args: of the run.
        accelerator: of the run.
        adapts: whether a learned drafter is trained along.
        parks: whether rollouts may have several turns, between which rows keep their K/V.

    Attributes:
        drafting: drafters and their control.
        counts: number of rollouts by mode. Each has its noise: an evaluation does not change the samples of training.
        records: log and verdict; of rank 0.
    """

    def __init__(self, args: RolloutOptions, accelerator: Accelerator, adapts: bool, parks: bool) -> None:
        rank, ranks = accelerator.process_index, accelerator.num_processes
        self._args, self._accelerator = args, accelerator
        self.drafting = RunDrafting(args, accelerator, adapts)
        self._draft_ranks = DraftRanks(args.draft_ranks, rank, ranks, args.ddp_timeout)
        shares, decoding = args.rollout_sharing == "pool", self._draft_ranks.decoding
        self._parked = ParkedRows() if parks else None
        several_chains = args.assistant_strategy == "best_of_n"
        self._sharing = SharedRollouts(
            shares, rank, ranks, args.ddp_timeout, decoding, self._parked, several_chains=several_chains
        )
        self._alarm = CollapseAlarm(by_first_token=args.sd_toggle == "measured" or args.assistant_strategy in CHOOSING)
        self.counts = {"train": 0, "eval": 0}
        self.records = RunRecords(args.output_dir if accelerator.is_main_process else None)
        self._totals = RolloutTotals()
        self._mode: Mode = "train"
        self._step = 0

    def expect_new_run(self) -> None:
        """Called where a run begins."""
        self.drafting.expect_new_weights()
        self.records.begin()

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def begin(self, mode: Mode, step: int) -> None:
        """Begins a rollout after `step` optimizer steps."""
        self._mode, self._step, self._totals = mode, step, RolloutTotals()
        self._sharing.begin()

    def gather(self, prompts: list[list[int]], have_images: bool = False) -> Turn:
        """Begins a turn with this rank's `prompts` (token ids), possibly none. All ranks must call it. Rows of prompts
        that `have_images` stay on their rank, and so do those of other ranks."""
        return self._sharing.gather(prompts, have_images)

    def decode(
        self,
        policy: PreTrainedModel,
        turn: Turn,
        generation_config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        images: Mapping[str, Any] | None = None,
    ) -> dict[int, Sampled]:
        """Returns the completions of this rank, by place in `turn`. The `policy` has whole weights, and is under the
        autocast of the training; the `tokenizer` pads, and reads stop strings; `images` are of this rank's rows
        (:func:`~.image_inputs`). All ranks must call it."""
        # Prompts are padded as on one rank, since some processors see the padding.
        padding, width = tokenizer.pad_token_id, max(map(len, turn.prompts))
        prompts = [turn.prompts[place] for place in turn.decoded]
        rows, device = self._sharing.rows_in_flight(turn, self._args.rollout_batch_size), self._accelerator.device
        generation_config = copy.copy(generation_config)
        generation_config.return_dict_in_generate = True  # deprecated as an argument next to a config
        decoded: dict[int, Sampled] = {}

        def padded(texts: Sequence[Sequence[int]], value: int) -> Tensor:
            return torch.tensor([[value] * (width - len(text)) + list(text) for text in texts], device=device)

        drafters, control = self.drafting.prepare(policy, self._step, rows, width, self._totals.durations)
        started = time.perf_counter()
        if self._draft_ranks.drafts:
            self._draft_ranks.serve(drafters[0], device, self._sharing.link())
            self._totals.durations.seconds += time.perf_counter() - started
        elif prompts:
            with self._draft_ranks.ahead(drafters) as drafting:
                output = policy.generate(
                    input_ids=padded(prompts, padding),  # [B, width]
                    attention_mask=padded([[1] * len(prompt) for prompt in prompts], 0),
                    **{
                        name: value.to(device) if isinstance(value, Tensor) else padded(value, 0)
                        for name, value in (images or {}).items()
                    },
                    generation_config=generation_config,
                    tokenizer=tokenizer,
                    assistant_strategy=self._args.assistant_strategy,
                    speculative_config=replace(self.drafting.config, max_batch_size=rows),
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
        self._totals.add_refreshes(drafters)
        return decoded

    def _request_ids(self, rows: list[int]) -> list[int]:
        """Ids that key the noise of these global rows: (mode, rollout, turn of a tool loop, global row)."""
        base = (self._mode == "eval") << 62 | self.counts[self._mode] << 36 | self._totals.turns << 24
        return [base | row for row in rows]

    def exchange(self, turn: Turn, decoded: dict[int, Sampled]) -> list[Sampled]:
        """Returns the completions of this rank's rows. All ranks must call it with what each has `decoded`."""
        completions = self._sharing.exchange(turn, decoded)
        for drafter in self.drafting.drafters:
            if isinstance(drafter, HistoryDrafter):
                for place in completions.keys() - decoded.keys():
                    drafter.remember(turn.prompts[place], completions[place].tokens)
        return [completions[place] for place in turn.own]

    # ---- after a rollout --------------------------------------------------------------------------------------------

    def finish(self, model: Any) -> dict[str, float]:
        """Logs the rollout of `model`, which may be wrapped by peft, and updates draft lengths; returns TRL's metrics.
        All ranks must call it."""
        drafting, strategy = self.drafting, self._args.assistant_strategy
        if self._parked is not None:
            self._parked.clear()
        totals = self._totals.over_ranks([drafter.strategy for drafter in drafting.drafters])
        candidates = drafting.control.candidates if drafting.control is not None else ()
        draft_lengths = {candidate.name: candidate.draft_length for candidate in candidates}
        record = totals.record(self._mode, self.counts[self._mode], self._step, strategy, draft_lengths)
        if self._accelerator.is_main_process:
            self.append(record, model)
            drafting.keep_rounds()
        if self._mode == "train":
            self._alarm.add(record)
            drafting.observe({name: tally.block_efficiency for name, tally in totals.counts.tallies.items()})
        return metrics(record, bool(policy_copies(drafting.drafters)), several_chains=strategy == "best_of_n")

    def append(self, record: Record, model: Any) -> None:
        """Adds a record of the run to its log, and to the verdict; on rank 0."""
        self.records.append(record, partial(self._header, model))

    def _header(self, model: Any) -> RunHeader:
        seconds, self.drafting.calibration_seconds = self.drafting.calibration_seconds, 0.0
        profile = None if self.drafting.profile is None else str(Path(self._args.output_dir) / PROFILE_FILE)
        return describe(
            model, self._accelerator.device, self._args.assistant_strategy,
            settings=self._args.own_options(), profile=profile, calibration_seconds=seconds,
        )  # fmt: skip

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str, is_shared: bool) -> None:
        """Writes this rank's state to a checkpoint, and that of all ranks where this rank `is_shared`'s writer."""
        self.drafting.save(folder, self.counts, is_shared)

    def load(self, folder: str) -> None:
        """Restores a checkpoint at the next rollout."""
        self.counts = self.drafting.load(folder) or self.counts
