"""Runs and times single decoding rounds of the engine, for the roofline profile and for the draft ladder."""

import gc
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..generation.configuration import SpeculativeConfig
from ..generation.engine.captured import CAPTURE_AFTER
from ..generation.engine.drafter import Drafter
from ..generation.engine.kept_runner import captures, runner_for
from ..generation.engine.processors import LogitsPipeline, PrefixView
from ..generation.engine.rollout import Rollout
from ..generation.engine.rows import Request, RequestQueue, Rows
from ..generation.engine.stopping import Stopping
from ..scheduling.control import Chain, NeverSpeculate


class RoundBench:
    """An engine whose requests never end, so that its rounds can be timed one by one.

    Args:
        model: the target.
        drafters: those that a round's chains name by their index.
        prompts: `[B, n]`, int64, one per row. Rows begin with one token more.
        columns: of the cache, per row.
        config: names the runner.
        rollout: the kind of rollout.
        processors: of logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafters: Sequence[Drafter],
        prompts: Tensor,
        columns: int,
        config: SpeculativeConfig,
        rollout: type[Rollout] = Rollout,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        batch = len(prompts)
        self._rows = Rows(batch, columns, model.device)
        view = PrefixView(self._rows, prompts)
        self._rollout = rollout(
            RequestQueue([Request(i, prompts[i], 2**62, i) for i in range(batch)]),
            runner_for(model, batch, columns, config),
            drafters,
            NeverSpeculate(),
            self._rows,
            LogitsPipeline(LogitsProcessorList(processors), view, batch),
            Stopping(StoppingCriteriaList(), view),
            do_sample=True,
            rejection=False,
            want_logprobs=False,
            strategy="measuring",
        )
        self._captures = captures(config, model.device)
        self._rollout.begin()
        self._rollout.admit()

    def round(self, plan: Sequence[Chain]) -> float:
        """Decodes one round and returns its seconds. RuntimeError: a drafter failed."""
        started = time.perf_counter()
        self._rollout.decode_round(plan)
        seconds = time.perf_counter() - started
        if self._rollout.drafters.failure is not None:
            raise RuntimeError(f"the drafter failed while it was timed: {self._rollout.drafters.failure}")
        return seconds

    def close(self) -> None:
        """Frees the cache."""
        self._rollout.end()
        if self._captures:
            gc.collect()  # a runner and what it captured hold each other


def warm_up_rounds(model: PreTrainedModel, config: SpeculativeConfig) -> int:
    """Rounds of each shape that are not timed: they prepare kernels and captured forwards."""
    return CAPTURE_AFTER if captures(config, model.device) else 1


def bar_text(what: str, model: PreTrainedModel, kept_in: Path | None) -> str:
    """The text of a progress bar; with `kept_in` it says that the work happens once."""
    return f"{what} {type(model).__name__}" + ("" if kept_in is None else f" (once; kept in {kept_in})")
