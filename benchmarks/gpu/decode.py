"""Decoding by our engine's "none" and by transformers: seconds per token after the prompt, at about 2048 tokens.

Groups: `generate` as it is (default), `generate_batch` (batched), `generate` with a static cache, compiled (static),
and what top-p (top_p) and `exact=True` (exact) cost.

Each way to generate is timed in turns with "none", after a whole warm-up call that compiles and captures. Seconds per
token leave the prompt out and are medians over the steps of a call: between tokens in transformers' loop, over rounds
in ours. generate_batch is timed while all rows decode, and gets the better of its median and its mean, since it may
hand out tokens in bursts. Whole calls are reported too.
"""

import time
from collections.abc import Callable, Sequence
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
from spec_trl.scheduling.control import NeverSpeculate

from .part import Part
from .shapes import config_of, random_model


BATCHES: dict[str, tuple[int, ...]] = {
    "default": (1, 8, 32), "batched": (8, 1, 32), "static": (8, 1, 32), "top_p": (1,), "exact": (1, 4, 16),
}  # fmt: skip
"""By group, the most telling first: those that take long may find no time for all."""
PROMPT, NEW = 2000, 96
REPEATS = 3
"""Timed calls; 2 of generate_batch, each of which sizes its cache and captures its graphs anew, which takes long."""
TOP_P, DRAFT_LENGTH = 0.9, 5
PLAIN = "none"
BATCHED_GRAPHS, EXACT = "generate_batch, CUDA graphs", "none, exact"


@dataclass
class Call:
    """One generation: seconds per token and of the whole call, and what it generated."""

    seconds_per_token: float  # of decoding, all rows together taking one step per token: the median step
    mean_seconds: float  # the mean over all tokens, with whatever happens between steps
    call_seconds: float  # with the prompt and everything else
    tokens: list[list[int]]  # [B][new]
    facts: dict[str, Any] = field(default_factory=dict)


SECONDS = ("seconds_per_token", "mean_seconds", "call_seconds")
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


def median_step(times: Sequence[float]) -> float:
    """Median of the differences."""
    return median(later - earlier for earlier, later in pairwise(times))


def sampled(new: int, top_p: float = 1.0) -> dict[str, Any]:
    """Keywords of sampling at temperature 1."""
    return dict(do_sample=True, temperature=1.0, top_k=0, top_p=top_p, max_new_tokens=new, pad_token_id=0)


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
        tokens = output[:, prompts.shape[1] :].tolist()
        mean = (stamps.times[-1] - stamps.times[0]) / (new - 1)
        return Call(median_step(stamps.times), mean, watch.value, tokens)

    return run


def transformers_batched(model: PreTrainedModel, new: int, use_cuda_graph: bool | None) -> Method:
    """`generate_batch`. Its cache is sized by itself on a GPU; on a CPU it would take all memory."""

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
        best = min(mean, median_step(together)) if len(together) > 1 else mean
        facts = {"cuda_graphs": str(config.use_cuda_graph), "median_step": median_step(together)}
        return Call(best, mean, watch.value, [list(output.generated_tokens) for output in done], facts)

    return run


def engine(
    model: PreTrainedModel, new: int, strategy: str = "none", top_p: float = 1.0, **fields: Any
) -> Method:
    """Ours, with fields of SpeculativeConfig."""

    def run(prompts: Tensor, seed: int) -> Call:
        rounds = RecordedRounds() if strategy == "none" else None
        with stopwatch(prompts.device) as watch:
            output = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), assistant_strategy=strategy,
                speculative_config=spec_trl.SpeculativeConfig(seed=seed, **fields), return_dict_in_generate=True,
                control=rounds, **sampled(new, top_p),
            )  # fmt: skip
        facts = output.statistics
        if facts.drafter_failure is not None:
            raise RuntimeError(f"the drafter failed: {facts.drafter_failure}")
        mean = (facts.seconds - facts.phase_seconds["prefill"]) / new
        tokens = output.sequences[:, prompts.shape[1] :].tolist()
        return Call(median(rounds.seconds) if rounds else mean, mean, watch.value, tokens, {
            "block_efficiency": facts.block_efficiency,
            "speculative_rounds": sum(point.rounds for point in facts.points if point.draft_length),
            "rounds": facts.rounds, "round_seconds": mean * new / facts.rounds, "graphs": facts.graphs,
            "phase_seconds": dict(facts.phase_seconds), "graph_bytes": facts.graph_bytes,
            "entropy": -facts.logprob_sum / facts.tokens,
        })  # fmt: skip

    return run


def make_prompts(batch: int, length: int, vocabulary: int, seed: int, device: torch.device) -> Tensor:
    """Random tokens [B, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator).to(device)


def alternate(
    part: Part, key: str, methods: dict[str, Method], prompts: Callable[[int], Tensor], repeats: int
) -> dict[str, list[Call]]:
    """Runs the methods in turns, a warm-up (with pass 0's prompts) and `repeats` timed calls each, fewer where the
    time runs out: what is killed in a call loses those before it. One whose warm-up fails drops out."""
    calls: dict[str, list[Call]] = {}
    longest: dict[str, float] = {}
    for name, method in methods.items():
        warm_up = part.attempt(f"{key} | {name} | warm-up", partial(method, prompts(0), part.seed))
        if warm_up is not None:
            # Its median step: whole, it has compiled and captured too.
            calls[name], longest[name] = [], 2 * warm_up.seconds_per_token * len(warm_up.tokens[0])
    for index in range(repeats):
        for name in list(calls):
            work = partial(methods[name], prompts(index), index)
            call = part.attempt(f"{key} | {name} | pass {index}", work, needs=longest[name])
            if call is not None:
                calls[name].append(call)
                longest[name] = max(each.call_seconds for each in calls[name])
    return {name: done for name, done in calls.items() if done}


def summarise(calls: dict[str, list[Call]], plain: str = PLAIN) -> dict[str, Any]:
    """Medians of each method, and the ratios of its seconds to those of `plain`: above 1, `plain` is faster."""
    found: dict[str, Any] = {}
    for name, done in calls.items():
        middle = {key: median(vars(call)[key] for call in done) for key in SECONDS}
        found[name] = middle | {"calls": len(done), "facts": done[-1].facts}
        if plain in calls and name != plain:
            pairs = list(zip(done, calls[plain], strict=False))
            for key, ratio in zip(SECONDS, ("over_plain", "mean_over_plain", "call_over_plain"), strict=True):
                found[name][ratio] = median(vars(a)[key] / vars(b)[key] for a, b in pairs)
            rows = [(x, y) for a, b in pairs for x, y in zip(a.tokens, b.tokens, strict=True)]
            found[name]["identical_rows"] = [sum(x == y for x, y in rows), len(rows)]
    return found


def methods_of(part: Part, model: PreTrainedModel, new: int) -> dict[str, Method]:
    """What is timed together in the part's group."""
    plain = {PLAIN: engine(model, new)}
    always: dict[str, Any] = dict(strategy="self", sd_toggle="always", draft_length=DRAFT_LENGTH)
    groups = {
        "default": plain | {"generate": transformers_generate(model, new)},
        "batched": plain | {
            "generate_batch": transformers_batched(model, new, None),
            BATCHED_GRAPHS: transformers_batched(model, new, True),
        },
        "static": plain | {
            "generate, static cache, compiled": transformers_generate(model, new, cache_implementation="static")
        },
        "top_p": plain | {
            "none, top-p": engine(model, new, top_p=TOP_P),
            "self": engine(model, new, **always),
            "self, top-p": engine(model, new, top_p=TOP_P, **always),
        },
        "exact": {
            PLAIN: engine(model, new, exact=False), EXACT: engine(model, new, exact=True),
            "self": engine(model, new, exact=False, **always),
            "self, exact": engine(model, new, exact=True, **always),
        },
    }  # fmt: skip
    methods = groups[part.group]
    if part.device.type != "cuda" and BATCHED_GRAPHS in methods:
        part.skip(BATCHED_GRAPHS, "needs a GPU")
        del methods[BATCHED_GRAPHS]
    return methods


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("decode", __doc__, arguments, groups=list(BATCHES))
    prompt, new, batches = (24, 8, (1, 2)) if part.is_smoke else (PROMPT, NEW, BATCHES[part.group])
    repeats = 1 if part.is_smoke else REPEATS - (part.group == "batched")
    part.state(dtype="bfloat16", prompt=prompt, new_tokens=new, temperature=1.0)
    config = config_of(part.shape)
    model = random_model(config, part.device, torch.bfloat16, part.seed)
    methods = methods_of(part, model, new)
    # The engine keeps captured forwards of one runner per model: its runners take no turns.
    together = [{name: own} for name, own in methods.items()] if part.group == "exact" else [methods]
    for batch in batches:
        if part.group == "static":
            torch.compiler.reset()  # else the second batch size is compiled for any size, and slower
        key = f"{part.group}, B {batch}"

        def prompts(index: int, batch: int = batch) -> Tensor:
            return make_prompts(batch, prompt, config.vocab_size, 1000 * part.seed + index, part.device)

        def work(key: str = key, prompts: Callable[[int], Tensor] = prompts) -> dict[str, Any]:
            calls = [alternate(part, key, some, prompts, repeats) for some in together]
            done = {name: done for found in calls for name, done in found.items()}
            exact = {name: own for name, own in done.items() if "exact" in name}
            return summarise(done) | ({"among exact": summarise(exact, EXACT)} if exact else {})

        part.measure(key, work)
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
