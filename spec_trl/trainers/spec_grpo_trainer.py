"""GRPOTrainer whose rollouts are speculative and token-identical to plain sampling."""

import copy
import json
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.extras.profiling import profiling_context
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

from ..generation.drafters.base import Drafter
from ..generation.drafters.self_draft import SelfDrafter
from ..generation.integration import make_drafter
from ..generation.statistics import DEPTH_EDGES, DraftCounts, SpeculationStatistics
from .spec_grpo_config import SpecGRPOConfig


_STATE_FILE = "rollout_state.json"


class SpecGRPOTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with lossless speculative rollouts (EfficientRollout).

    A drop-in replacement: the constructor's arguments are GRPOTrainer's, `args` is a [`SpecGRPOConfig`]. With exact
    verification completions, losses and weights are those of `assistant_strategy="none"`, whatever drafts.
    A `rollout_func` is left alone: it generates, and nothing here does.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or `PeftModel`): the policy.
        reward_funcs: as in GRPOTrainer.
        args ([`SpecGRPOConfig`], *optional*): configuration.
        kwargs: GRPOTrainer's other arguments.
    """

    _tag_names = ["trl", "grpo", "spec_trl"]

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: SpecGRPOConfig | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if args is None:
            args = SpecGRPOConfig(output_dir="SpecGRPO")
        elif not isinstance(args, SpecGRPOConfig):
            raise ValueError(f"args is a {type(args).__name__}; SpecGRPOTrainer needs a SpecGRPOConfig.")
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if self._dist.is_fsdp:
            raise ValueError(
                "FSDP is not served yet: the drafter needs the gathered weights of each layer. Use DDP or DeepSpeed."
            )
        self._speculative_config = args.speculative_config()
        self._drafter: Drafter | None = None
        self._drafted_step = -1
        # Rollouts so far, per mode: evaluation in between must not change what training samples.
        self._rollouts = {"train": 0, "eval": 0}
        self._totals = _RolloutTotals()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # Weights are replaced around a run (resuming, a second run, load_best_model_at_end) while no step is counted.
        self._drafted_step = -1
        try:
            return super().train(*args, **kwargs)
        finally:
            self._drafted_step = -1

    def _generate(self, prompts: list[Any]) -> Any:
        mode = "train" if self.model.training else "eval"
        self._totals = _RolloutTotals()
        result = super()._generate(prompts)
        self._rollouts[mode] += 1
        if self.rollout_func is None:
            self._log_rollout(mode)
        return result

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], None]:
        if images or multimodal_fields:
            raise ValueError(
                f"the prompts carry {sorted(multimodal_fields) or 'images'}; SpecGRPOTrainer generates from text. "
                "Use trl.GRPOTrainer for multimodal prompts."
            )
        started = time.perf_counter()
        tensors = [torch.tensor(ids) for ids in prompt_ids]
        input_ids = pad(tensors, padding_value=self._tokenizer.pad_token_id, padding_side="left")  # [B, width]
        attention_mask = pad([torch.ones_like(t) for t in tensors], padding_value=0, padding_side="left")  # [B, width]
        generation_config = copy.copy(self.generation_config)
        generation_config.return_dict_in_generate = True  # next to a config, as an argument, it is deprecated
        with (
            profiling_context(self, "spec_trl.generate"),
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as unwrapped,
            torch.no_grad(),
            # One autocast around the whole rollout: its weight cache then casts fp32 weights once, not in every step.
            self.accelerator.autocast(),
        ):
            policy = unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped
            drafter = self._fresh_drafter(policy)
            output = policy.generate(
                input_ids=input_ids.to(self.accelerator.device),
                attention_mask=attention_mask.to(self.accelerator.device),
                generation_config=generation_config,
                assistant_strategy=self.args.assistant_strategy,
                speculative_config=self._speculative_config,
                drafter=drafter,
                request_ids=self._request_ids(len(prompt_ids)),
            )
        self._totals.add(output.statistics, time.perf_counter() - started)
        new = output.sequences[:, input_ids.shape[1] :].tolist()  # [B, new]
        completions = [row[:length] for row, length in zip(new, output.lengths.tolist(), strict=True)]
        # No logprobs, as in TRL's own transformers path: the loss recomputes them in the training forward.
        return completions, None

    def _fresh_drafter(self, policy: PreTrainedModel) -> Drafter | None:
        """The drafter, refreshed if the weights have changed since it was (ER Algorithm 1, line 3).

        `global_step` counts optimizer steps: it stands still over micro-steps, over the reuse of a generation batch
        (`num_iterations`, `steps_per_generation`) and over evaluation.
        """
        if self.args.assistant_strategy == "none":
            return None
        started = time.perf_counter()
        if self._drafter is None:
            self._drafter = make_drafter(
                self.args.assistant_strategy, policy, self.args.assistant_model, self._speculative_config
            )
        elif isinstance(self._drafter, SelfDrafter) and self._drafted_step != self.state.global_step:
            self._drafter.refresh()
        if self._drafted_step != self.state.global_step:
            self._drafted_step = self.state.global_step
            if policy.device.type == "cuda":
                torch.cuda.synchronize()
            self._totals.refresh_seconds += time.perf_counter() - started
        return self._drafter

    def _request_ids(self, count: int) -> list[int]:
        """Ids that key the noise: (mode, rollout, turn, global row), the same for any number of ranks.

        Never `global_step`, within which generation repeats, and never local rows, with which ranks would sample
        identical completions. Turns are those of a tool loop, which calls again with some of the rows: behind the
        first turn a rank numbers those it has, so there the ids depend on how rows are spread over ranks.
        """
        mode = "train" if self.model.training else "eval"
        if self._totals.turns == 0:
            self._rows_per_rank = count
        first = self.accelerator.process_index * self._rows_per_rank
        base = (mode == "eval") << 62 | self._rollouts[mode] << 36 | self._totals.turns << 24
        return [base | row for row in range(first, first + count)]

    def _log_rollout(self, mode: str) -> None:
        """Appends this rollout to TRL's metrics, summed over ranks."""
        totals = self._totals
        # Sums: [1 + bins, 6] draft counts, then scalars. Every rank sends the same shapes, whatever its tool loop did.
        counts = torch.tensor([astuple(totals.drafts), *map(astuple, totals.depths)], dtype=torch.float64)
        scalars = torch.tensor(
            [totals.tokens, totals.logprob_sum, totals.rounds, totals.speculative_rounds, totals.draft_length_sum],
            dtype=torch.float64,
        )
        times = torch.tensor([totals.seconds, totals.refresh_seconds], dtype=torch.float64)
        packed = torch.cat([counts.flatten(), scalars, times]).to(self.accelerator.device)  # [n]
        every = self.accelerator.gather(packed[None])  # [ranks, n]
        summed = every.sum(0).cpu()  # [n]
        seconds, refresh_seconds = every[:, -2:].amax(0).tolist()  # the slowest rank is what a step waits for
        drafts, *depths = (DraftCounts(*map(int, row)) for row in summed[: counts.numel()].view(counts.shape).tolist())
        tokens, logprob_sum, rounds, speculative, draft_length_sum = summed[counts.numel() : -2].tolist()

        metrics = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            # -log p of the sampled tokens is an unbiased estimate of the entropy they were drawn with.
            "target_entropy": -logprob_sum / tokens,
        }
        if self.args.assistant_strategy != "none":
            metrics |= {
                "block_efficiency": drafts.block_efficiency,
                "acceptance_rate": drafts.acceptance_rate,
                "first_token_acceptance": drafts.first_token_acceptance,
                "draft_length": draft_length_sum / speculative if speculative else 0.0,
                "sd_on_fraction": speculative / rounds,
            }
            if self.args.assistant_strategy == "self":
                metrics["drafter_refresh_seconds"] = refresh_seconds
            for edge, depth in zip(DEPTH_EDGES, depths, strict=True):
                if depth.blocks:
                    metrics[f"block_efficiency_from_{edge}"] = depth.block_efficiency
        for name, value in metrics.items():
            self._metrics[mode][f"rollout/{name}"].append(value)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:  # the counters are our random state: saved with it, before old checkpoints go
            (Path(output_dir) / _STATE_FILE).write_text(json.dumps({"rollouts": self._rollouts}))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / _STATE_FILE).exists():
            self._rollouts = json.loads(path.read_text())["rollouts"]


@dataclass
class _RolloutTotals:
    """One rollout of this rank, all turns of its tool loop together."""

    turns: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    depths: list[DraftCounts] = field(default_factory=lambda: [DraftCounts() for _ in DEPTH_EDGES])
    tokens: int = 0
    logprob_sum: float = 0.0
    rounds: int = 0
    speculative_rounds: int = 0
    draft_length_sum: int = 0
    seconds: float = 0.0
    refresh_seconds: float = 0.0

    def add(self, statistics: SpeculationStatistics, seconds: float) -> None:
        """Adds one `generate` call that took `seconds`, preparation included."""
        self.turns += 1
        self.drafts += statistics.total
        self.depths = [
            total + statistics.per_depth.get(edge, DraftCounts())
            for edge, total in zip(DEPTH_EDGES, self.depths, strict=True)
        ]
        self.tokens += statistics.tokens
        self.logprob_sum += statistics.logprob_sum
        self.rounds += statistics.rounds
        ends = [start for start, _ in statistics.speculating[1:]] + [statistics.rounds]
        for (start, draft_length), end in zip(statistics.speculating, ends, strict=True):
            self.speculative_rounds += (end - start) * (draft_length > 0)
            self.draft_length_sum += (end - start) * draft_length
        self.seconds += seconds
