"""Rounds of the engine, as rollouts run them: T_p, T_q with packed and with dense head, T_V, and the sampling's share.

T_p is a whole autoregressive round, T_q a draft step, T_V a round without its drafting (ER §3.2). All of them hold the
engine's own bookkeeping; rows hold about 2048 tokens.
"""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from spec_trl import SpeculativeConfig
from spec_trl.efficient_rollout.fill_profile import _Bench, _NoDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.captured import CAPTURE_AFTER
from spec_trl.generation.engine.model_costs import model_constants
from spec_trl.quantization import QuantizedLinear

from .part import Part
from .shapes import config_of, random_model
from .timing import copy_bandwidth


BATCHES = (1, 2, 4, 8, 32)
LENGTH = 2048
DRAFT_LENGTH = 5
MARGIN = 16  # columns after the longest row that a round may write
VISITS = 3
SECONDS = 0.6  # of one visit
SAMPLING_PHASES = ("noise", "accept")

Runner = Literal["auto", "compiled"]


def read_bytes(model: PreTrainedModel) -> float:
    """Bytes of weights that decoding one token reads: all but a table of embeddings that is looked up alone."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return model_constants(model).weight_bytes - (0 if table is head else table.nbytes)


def time_cells(
    part: Part, bench: _Bench, batches: Sequence[int], length: int, gammas: Sequence[int] = (0, DRAFT_LENGTH)
) -> dict[str, dict[int, float]]:
    """Median seconds of "target", "draft" and "verify" by batch; visits to the cells take turns."""
    samples: dict[str, dict[int, list[float]]] = {}
    seconds = 0.02 if part.is_smoke else SECONDS
    for visit in range(VISITS):
        for batch in batches:
            for gamma in gammas:
                if visit and part.seconds_left <= 0:
                    break
                for mode, value in bench.rounds(batch, length, gamma, seconds, warm_ups=1 if visit else CAPTURE_AFTER):
                    samples.setdefault(mode, {}).setdefault(batch, []).append(value)
    return {mode: {batch: median(times) for batch, times in cells.items()} for mode, cells in samples.items()}


def sampling(part: Part, bench: _Bench, batch: int, length: int) -> dict[str, Any]:
    """Seconds of a round's phases at `batch` rows, and the share of noise and acceptance.

    The phase of acceptance ends when the host has read the round's tokens, so the share is an upper bound.
    """
    before = bench._rollout.record.phase_seconds()
    seconds = [value for _, value in bench.rounds(batch, length, 0, SECONDS, warm_ups=0)]
    after = bench._rollout.record.phase_seconds()
    phases = {name: value - before.get(name, 0.0) for name, value in after.items()}
    whole = sum(phases.values())
    return {
        "batch": batch,
        "round_seconds": seconds[0],
        "phase_shares": {name: value / whole for name, value in phases.items()},
        "share": sum(phases.get(name, 0.0) for name in SAMPLING_PHASES) / whole,
    }


def target_alone(
    part: Part, model: PreTrainedModel, runner: Runner, length: int, batches: Sequence[int]
) -> dict[int, float]:
    """Seconds of autoregressive rounds by batch, before a drafter is made, which compiles and measures kernels."""
    bench = _Bench(model, _NoDrafter(), max(batches), [length], MARGIN, SpeculativeConfig(runner=runner))
    try:
        return time_cells(part, bench, batches, length, gammas=(0,))["target"]
    finally:
        bench.close()


def with_head(
    part: Part, model: PreTrainedModel, head: Literal["packed", "dense"], length: int, batches: Sequence[int]
) -> dict[str, Any]:
    """All cells with a drafter whose lm_head is "packed" or "dense"."""
    config = SpeculativeConfig(draft_lm_head=head)
    started = time.perf_counter()
    drafter = SelfDrafter(model, config.draft_quantization, config.draft_kernel, head)
    making = time.perf_counter() - started
    constants = model_constants(model, drafter.quantized)
    bench = _Bench(model, drafter, max(batches), [length], MARGIN, config)
    try:
        cells = time_cells(part, bench, batches, length)
        share = sampling(part, bench, max(batches), length)
    finally:
        bench.close()
    return {
        "seconds": cells,
        "sampling": share,
        "making_the_drafter_seconds": making,  # the first one on a machine also measures the kernels
        "draft_max_rows": drafter.max_rows,
        "draft_weight_bytes": constants.draft_weight_bytes,
        "kernels": sorted(
            {layer.packed.name for layer in drafter.quantized.layers.values() if isinstance(layer, QuantizedLinear)}
        ),
        "graphs": bench._rollout.target.captured,
        "ratios": {
            batch: {
                "T_q / T_p": cells["draft"][batch] / target if batch in cells.get("draft", {}) else None,
                "T_V / T_p": cells["verify"][batch] / target,
            }
            for batch, target in cells["target"].items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("rounds", __doc__, arguments)
    length, batches = (64, (1, 2)) if part.is_smoke else (LENGTH, BATCHES)
    part.state(dtype="bfloat16", length=length, draft_length=DRAFT_LENGTH)
    model = random_model(config_of(part.shape), part.device, torch.bfloat16, part.seed)
    bandwidth, weights = copy_bandwidth(part.device), read_bytes(model)
    constants = model_constants(model)
    part.record("roofline", {
        "copy_bandwidth": bandwidth,
        "read_weight_bytes": weights,
        "kv_bytes_per_token": constants.kv_bytes,
        "weight_seconds": weights / bandwidth,
        "seconds": {batch: (weights + batch * length * constants.kv_bytes) / bandwidth for batch in batches},
    })  # fmt: skip

    def alone(runner: Runner) -> None:
        found = part.measure(f"target, {runner}", partial(target_alone, part, model, runner, length, batches))
        if found is not None:
            part.record(f"T_p over weight bytes / copy bandwidth, {runner}", found[1] * bandwidth / weights)

    with torch.no_grad():
        alone("auto")
        heads: tuple[Literal["packed", "dense"], ...] = ("packed", "dense")
        for head in heads:
            part.measure(f"head {head}", partial(with_head, part, model, head, length, batches))
        if part.device.type == "cuda":
            alone("compiled")
        else:
            part.skip("target, compiled", "needs a GPU")
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
