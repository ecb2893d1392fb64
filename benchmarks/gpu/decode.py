"""Ways to generate, ours and transformers', and their times.

Each way is timed in turns with the others, after a whole warm-up call that compiles and captures. Seconds per token
leave the prompt out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import spec_trl
from benchmarks.measure import stopwatch
from spec_trl.generation.planner.control import NeverSpeculate

from .stage import Stage


PLAIN = "none"


@dataclass
class Call:
    """One generation: its seconds, and what it generated."""

    token_seconds: float  # per token after the first, all rows together taking one step per token: the mean
    call_seconds: float  # with the prompt and everything else
    tokens: list[list[int]]  # [B][new]
    facts: dict[str, Any] = field(default_factory=dict)


Method = Callable[[Tensor, int], Call]
"""Generates from prompts [B, prompt] with a seed."""


class RecordedRounds(NeverSpeculate):
    """Decodes autoregressively and keeps each round's seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        if is_typical:
            self.seconds.append(seconds)


class _Stamps(StoppingCriteria):
    """Notes when each token was chosen; transformers' loop waits for the device once per token anyway."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def sampled(new: int) -> dict[str, Any]:
    """Keywords of sampling at temperature 1."""
    return dict(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new, pad_token_id=0)


def transformers_generate(model: PreTrainedModel, new: int, **more: Any) -> Method:
    """`generate` with keywords `more`."""

    def run(prompts: Tensor, seed: int) -> Call:
        torch.manual_seed(seed)
        stamps = _Stamps()
        with stopwatch(prompts.device) as watch:
            output = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), stopping_criteria=StoppingCriteriaList([stamps]),
                **sampled(new), **more,
            )  # fmt: skip
        mean = (stamps.times[-1] - stamps.times[0]) / (new - 1)
        return Call(mean, watch.value, output[:, prompts.shape[1] :].tolist())

    return run


def transformers_batched(model: PreTrainedModel, new: int, use_cuda_graph: bool | None) -> Method:
    """`generate_batch`, timed while all rows decode; tokens may come in bursts, so the median step counts where it is
    below the mean. Its cache is sized by itself on a GPU; on a CPU it would take all memory."""

    def run(prompts: Tensor, seed: int) -> Call:
        config = ContinuousBatchingConfig(seed=seed, use_cuda_graph=use_cuda_graph)
        if prompts.device.type == "cpu":
            config.num_blocks, config.max_batch_tokens = 2 * len(prompts) + 2, max(256, prompts.numel())
        generation = GenerationConfig(**sampled(new), eos_token_id=None)
        with stopwatch(prompts.device) as watch:
            outputs = model.generate_batch(
                prompts.tolist(), generation_config=generation, continuous_batching_config=config,
                record_timestamps=True,
            )  # fmt: skip
        done = list(outputs.values())
        if len(done) != len(prompts) or any(output.error for output in done):
            raise RuntimeError(f"generate_batch failed: {[output.error for output in done]}")
        stamps = [output.timestamps for output in done]
        first, last = max(times[0] for times in stamps), min(times[-1] for times in stamps)
        steps = median(sum(first < moment <= last for moment in times) for times in stamps)
        if steps < new / 4:
            raise RuntimeError(f"rows overlapped in {steps} of {new} steps only: no time per token can be told")
        mean = (last - first) / steps
        together = [moment for moment in stamps[0] if first <= moment <= last]
        each = [later - earlier for earlier, later in pairwise(together)]
        best = min(mean, median(each)) if each else mean
        return Call(best, watch.value, [list(output.generated_tokens) for output in done], {"mean_seconds": mean})

    return run


def engine(model: PreTrainedModel, new: int, strategy: str = PLAIN, **fields: Any) -> Method:
    """Ours, with fields of SpeculativeConfig. Facts "T_p": seconds of a plain round; "T_q": of a draft step; "T_V": of
    a round that drafted, without its draft steps (ER §3.2)."""

    def run(prompts: Tensor, seed: int) -> Call:
        rounds = RecordedRounds() if strategy == PLAIN else None
        with stopwatch(prompts.device) as watch:
            output = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), assistant_strategy=strategy,
                speculative_config=spec_trl.SpeculativeConfig(seed=seed, **fields), return_dict_in_generate=True,
                control=rounds, **sampled(new),
            )  # fmt: skip
        found = output.statistics
        if found.drafter_failure is not None:
            raise RuntimeError(f"the drafter failed: {found.drafter_failure}")
        facts = {
            "block_efficiency": found.block_efficiency, "rounds": found.rounds, "drafted_rounds": found.drafted_rounds,
            "graphs": found.graphs, "graph_bytes": found.graph_bytes, "cache_bytes": found.cache_bytes,
            "setup_seconds": found.setup_seconds, "phase_seconds": dict(found.phase_seconds), "reason": found.reason,
        }  # fmt: skip
        drafted = [point for point in found.points if point.draft_length]
        if rounds is not None:
            facts["T_p"] = median(rounds.seconds)
        elif strategy == "self" and drafted:  # nothing else drafts, and it shares the target's K/V
            drafting = found.phase_seconds["draft"]
            facts["T_q"] = drafting / sum(point.rounds * point.draft_length for point in drafted)
            facts["T_V"] = (sum(point.seconds for point in drafted) - drafting) / found.drafted_rounds
        decoding = found.seconds - found.phase_seconds["prefill"]
        return Call(decoding / new, watch.value, output.sequences[:, prompts.shape[1] :].tolist(), facts)

    return run


def make_prompts(batch: int, length: int, vocabulary: int, seed: int, device: torch.device) -> Tensor:
    """Random tokens [B, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator).to(device)


def alternate(
    stage: Stage, key: str, methods: dict[str, Method], prompts: Callable[[int], Tensor], repeats: int
) -> dict[str, list[Call]]:
    """Runs the methods in turns, a warm-up (with pass 0's prompts) and `repeats` timed calls each, fewer where the
    time runs out. One whose warm-up fails drops out."""
    calls: dict[str, list[Call]] = {}
    longest: dict[str, float] = {}
    for name, method in methods.items():
        warm_up = stage.attempt(f"{key} | {name} | warm-up", partial(method, prompts(0), stage.seed))
        if warm_up is not None:
            calls[name], longest[name] = [], 0.0
    for index in range(repeats):
        for name in list(calls):
            work = partial(methods[name], prompts(index), index)
            call = stage.attempt(f"{key} | {name} | pass {index}", work, needs=longest[name])
            if call is not None:
                calls[name].append(call)
                longest[name] = max(each.call_seconds for each in calls[name])
    return {name: done for name, done in calls.items() if done}


def summarise(calls: dict[str, list[Call]]) -> dict[str, Any]:
    """Medians of each method; `over_none`: its tokens per second over those of "none", call by call."""
    found: dict[str, Any] = {}
    for name, done in calls.items():
        seconds = median(call.token_seconds for call in done)
        found[name] = own = {
            "tokens_per_second": len(done[0].tokens) / seconds, "token_ms": 1e3 * seconds,
            "call_seconds": median(call.call_seconds for call in done), "calls": len(done), "facts": done[-1].facts,
        }  # fmt: skip
        for step in ("T_p", "T_q", "T_V"):
            if step in done[0].facts:
                found[f"{step}, ms"] = 1e3 * median(call.facts[step] for call in done)
        if PLAIN in calls and name != PLAIN:
            pairs = list(zip(done, calls[PLAIN], strict=False))
            own["over_none"] = median(plain.token_seconds / mine.token_seconds for mine, plain in pairs)
            rows = [(x, y) for a, b in pairs for x, y in zip(a.tokens, b.tokens, strict=True)]
            own["identical_rows"] = [sum(x == y for x, y in rows), len(rows)]
    return found
