"""Calls of `generate` under the clock, in turns: what the benchmarks of whole calls share."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

import spec_trl
from spec_trl import SpeculativeConfig
from spec_trl.generation.engine.statistics import SpeculationStatistics

from .measure import stopwatch
from .workload import Workload


@dataclass(frozen=True)
class Call:
    """One `generate` call: seconds on the caller's clock, new tokens of each row, and the call's statistics."""

    seconds: float
    completions: list[list[int]]
    statistics: SpeculationStatistics

    @property
    def speculative_share(self) -> float:
        """Of the decoding rounds, those with a draft; 0 where first tokens, which take no round, ended all rows."""
        return self.statistics.drafted_rounds / max(self.statistics.rounds, 1)


Way = Callable[[Workload, int], Call]
"""Generates for a workload with a seed."""


def forget(model: PreTrainedModel) -> None:
    """Nothing is known of it any more, in this process and in the user's cache."""
    spec_trl.release(model)
    if folder := os.environ.get("SPEC_TRL_CACHE"):
        shutil.rmtree(folder, ignore_errors=True)


def way(model: PreTrainedModel, strategy: str, config: SpeculativeConfig, **options: Any) -> Way:
    """A way to generate with our engine; the seed of a call replaces the config's; `options` are other arguments of
    `generate`.

    Raises:
        RuntimeError: at a call: the drafter failed. The engine goes on without it, a measurement must not.
    """

    def call(work: Workload, seed: int) -> Call:
        inputs = work.padded(model.device)
        with stopwatch(model.device) as watch:
            output = model.generate(
                **inputs, **sampling(work), **options, assistant_strategy=strategy,
                speculative_config=replace(config, seed=seed), return_dict_in_generate=True,
            )  # fmt: skip
        if output.statistics.drafter_failure is not None:
            raise RuntimeError(f"the drafter of {strategy!r} failed: {output.statistics.drafter_failure}")
        new = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        rows = [row[:length] for row, length in zip(new, output.lengths.tolist(), strict=True)]
        return Call(watch.value, rows, output.statistics)

    return call


def sampling(work: Workload) -> dict[str, object]:
    """Keywords of plain temperature sampling; transformers' default would add top_k=50."""
    options: dict[str, object] = {"do_sample": True, "temperature": work.temperature, "top_k": 0}
    return options | {"max_new_tokens": work.max_new_tokens, "pad_token_id": work.pad_token_id}


def rotated(names: Sequence[str], by: int) -> list[str]:
    """`names`, beginning with number `by`."""
    return [names[(by + place) % len(names)] for place in range(len(names))]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Within each repeat."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def identical_rows(ours: Sequence[Call], theirs: Sequence[Call]) -> tuple[int, int]:
    """Number of equal completions, and of all, in calls of two ways in the same turns."""
    calls = zip(ours, theirs, strict=True)
    same = [mine == other for a, b in calls for mine, other in zip(a.completions, b.completions, strict=True)]
    return sum(same), len(same)
