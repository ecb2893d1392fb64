"""Sets the draft length of each step inside vLLM: its `scheduler_cls`."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from . import step_planner


class _PlansLengths(Scheduler):
    """vLLM's scheduler, whose steps draft as many tokens as the planner expects to pay, 0 where drafts do not."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        options = vllm_config.additional_config["spec_trl"]
        strategy, lengths = options["strategy"], options["draft_lengths"]
        self._planner = step_planner.StepPlanner(strategy, lengths, self.max_num_running_reqs)
        self._verdicts: list[tuple[int, int]] = []  # of the newest step's rows, drafted and accepted

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        length = 0
        if rows := len(self.running):
            mean = sum(request.num_tokens for request in self.running) / rows
            length = self._planner.next_length(rows, mean, len(self.waiting))
        step_planner.newest_length = length = min(length, self.num_spec_tokens)
        # By number of scheduled rows, as vLLM has it of num_speculative_tokens_per_batch_size.
        self.dynamic_sd_lookup = [length] * (self.max_num_running_reqs + 2)
        return super().schedule(*args, **kwargs)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        if num_draft_tokens:
            self._verdicts.append((num_draft_tokens, num_accepted_tokens))
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs
        )

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().update_from_output(scheduler_output, *args, **kwargs)
        drafted, accepted = [one for one, _ in self._verdicts], [one for _, one in self._verdicts]
        rows = scheduler_output.num_scheduled_tokens
        self._planner.observe(len(rows), accepted, drafted, bool(scheduler_output.scheduled_new_reqs))
        self._verdicts.clear()
        if not self.has_unfinished_requests():
            self._planner.end()
        return found


class LengthScheduler(_PlansLengths):
    """On a CPU, where steps are not overlapped."""


class AsyncLengthScheduler(_PlansLengths, AsyncScheduler):
    """On a GPU, where the next step is scheduled while one runs."""
