"""What one decoding round is made of on the device: weights, attention, sampling, the rest, gaps; and its roofline.

Kernels are told apart by their names; the longest are listed by name, so that they can be told apart again. Gaps are
the time in which no kernel runs. The profiler itself slows the host, so shares of captured rounds are more to be
trusted than those of eager ones, whose unprofiled seconds are shown too. Of captured rounds at batch 1, with drafts
and without, and at the largest batch a trace is kept that a browser's tracing page opens.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from spec_trl import SpeculativeConfig
from spec_trl.efficient_rollout.fill_profile import _Bench
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.captured import CAPTURE_AFTER
from spec_trl.generation.engine.model_costs import model_constants

from .kernels_per_layer import FAMILIES, per_layer
from .part import Part
from .rounds import DRAFT_LENGTH, LENGTH, MARGIN, read_bytes
from .shapes import config_of, random_model
from .timing import copy_bandwidth


BATCHES = (1, 8, 32)
LONGEST = 30
PATTERNS = {  # the first that is found in a kernel's name
    "sampling": r"^_draw_chunk|^_merge_chunks|argmax|logsumexp",
    "attention": r"^_attend|^_merge|attention|flash|fmha|sdpa",
    "weights": r"^_int4_mm|gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|int4|humming|marlin|dot_kernel",
}

Kernel = tuple[str, float, float]
"""Name, start and end in microseconds."""


def category(name: str) -> str:
    """Of a kernel."""
    return next((kind for kind, pattern in PATTERNS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def busy_microseconds(kernels: Iterable[Kernel]) -> float:
    """In which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def breakdown(kernels: Sequence[Kernel], rounds: int) -> dict[str, Any]:
    """Seconds per round by category, and of the longest kernels."""
    by_kind: dict[str, float] = dict.fromkeys([*PATTERNS, "other"], 0.0)
    by_name: dict[str, tuple[float, int]] = {}
    for name, start, end in kernels:
        by_kind[category(name)] += end - start
        seconds, count = by_name.get(name, (0.0, 0))
        by_name[name] = (seconds + end - start, count + 1)
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:LONGEST]
    return {
        "rounds": rounds,
        "busy_seconds": busy_microseconds(kernels) / 1e6 / rounds,
        "seconds": {kind: total / 1e6 / rounds for kind, total in by_kind.items()},
        "kernels_per_round": len(kernels) / rounds,
        "longest": [
            {"name": name[:160], "kind": category(name), "seconds": total / 1e6 / rounds, "calls": count / rounds}
            for name, (total, count) in longest
        ],
    }


def profiled(
    part: Part, bench: _Bench, batch: int, length: int, gamma: int, trace: Path | None = None
) -> dict[str, Any]:
    """One cell: timed without the profiler, then recorded by it. `trace`: where a few rounds are kept."""
    log = bench._rollout.record.log
    list(bench.rounds(batch, length, gamma, 0.0, warm_ups=CAPTURE_AFTER))
    plain = sum(seconds for _, seconds in bench.rounds(batch, length, 0, 0.3, warm_ups=1)) if gamma == 0 else None
    before = log.rounds
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        list(bench.rounds(batch, length, gamma, 0.1, warm_ups=0))
    if trace is not None:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as few:
            list(bench.rounds(batch, length, gamma, 0.0, warm_ups=0))
        few.export_chrome_trace(str(trace))
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    found = breakdown(kernels, log.rounds - before)
    if plain is not None:
        found |= {"round_seconds": plain, "gap_seconds": max(plain - found["busy_seconds"], 0.0)}
    return found


def measure(
    part: Part, model: PreTrainedModel, runner: Literal["eager", "graph"], batches: Sequence[int], length: int
) -> dict[str, Any]:
    """Autoregressive rounds at every batch, and rounds with drafts at the smallest."""
    config = SpeculativeConfig(runner=runner, draft_lm_head="packed")
    drafter = SelfDrafter(model, config.draft_quantization, config.draft_kernel, config.draft_lm_head)
    bench = _Bench(model, drafter, max(batches), [length], MARGIN, config)
    try:
        found: dict[str, Any] = {}
        for batch, gamma in [*((batch, 0) for batch in batches), (batches[0], DRAFT_LENGTH)]:
            traced = runner == "graph" and batch in (batches[0], batches[-1]) or part.is_smoke
            trace = part.folder / f"trace_B{batch}_gamma{gamma}.json.gz" if traced else None
            key = f"B {batch}" + (", with drafts" if gamma else "")
            found[key] = profiled(part, bench, batch, length, gamma, trace)
    finally:
        bench.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("profiling", __doc__, arguments)
    length, batches = (64, (1, 2)) if part.is_smoke else (LENGTH, BATCHES)
    part.state(dtype="bfloat16", length=length)
    model = random_model(config_of(part.shape), part.device, torch.bfloat16, part.seed)
    bandwidth, kv_bytes = copy_bandwidth(part.device), model_constants(model).kv_bytes
    part.record("roofline", {
        f"B {batch}": {
            "weights": read_bytes(model) / bandwidth,
            "attention": batch * length * kv_bytes / bandwidth,
        }
        for batch in batches
    })  # fmt: skip
    runners: tuple[Literal["eager", "graph"], ...] = ("graph", "eager") if part.device.type == "cuda" else ("eager",)
    if part.device.type == "cuda":
        part.measure("kernels per layer", lambda: {family: per_layer(family).total() for family in FAMILIES})
    with torch.no_grad():
        for runner in runners:
            part.measure(runner, partial(measure, part, model, runner, batches, length))
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
