"""Rounds of the engine, as rollouts run them: T_p, T_q with packed and with dense head, T_V, and the sampling's share;
and what the planner believes of them before its first round.

T_p is a whole autoregressive round, T_q a draft step, T_V a round without its drafting (ER §3.2). All of them hold the
engine's own bookkeeping; rows hold about 2048 tokens. The probe runs twice: in a process that has compiled nothing,
and again. What counts is how far its belief is off, either way.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks.measure import stopwatch
from spec_trl import SpeculativeConfig
from spec_trl.efficient_rollout.calibration import _Bench, _NoDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.graph_runner import CAPTURE_AFTER
from spec_trl.generation.engine.model_costs import model_constants
from spec_trl.measuring.probe import probe
from spec_trl.quantization import QuantizedLinear

from .part import Part
from .shapes import config_of, random_model


BATCHES = (1, 2, 4, 8, 32)
LENGTH = 2048
DRAFT_LENGTH = 5
MARGIN = 16  # columns after the longest row that a round may write
VISITS = 3
SECONDS = 0.6  # of one visit
SAMPLING_PHASES = ("noise", "accept")

Seconds = dict[str, dict[int, float]]
"""Of "target", "draft" and "verify", by batch."""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, the median of many."""
    source = torch.empty((1 << 30) if device.type == "cuda" else 1 << 20, dtype=torch.float32, device=device).normal_()
    target, seconds = torch.empty_like(source), []
    for _ in range(17):
        with stopwatch(device) as watch:
            target.copy_(source)
        seconds.append(watch.value)
    return 2 * source.nbytes / median(seconds[2:])  # the first ones warm up


def read_bytes(model: PreTrainedModel) -> float:
    """Bytes of weights that decoding one token reads: all but a table of embeddings that is looked up alone."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return model_constants(model).weight_bytes - (0 if table is head else table.nbytes)


def time_cells(
    part: Part, bench: _Bench, batches: Sequence[int], length: int, gammas: Sequence[int] = (0, DRAFT_LENGTH)
) -> Seconds:
    """Medians; visits to the cells take turns."""
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


def sampling_share(bench: _Bench, batch: int, length: int) -> float:
    """Of noise and acceptance in a round of `batch` rows. The phase of acceptance ends when the host has read the
    round's tokens, so it is an upper bound."""
    before = bench._rollout.record.phase_seconds()
    list(bench.rounds(batch, length, 0, SECONDS, warm_ups=0))
    phases = {name: value - before.get(name, 0.0) for name, value in bench._rollout.record.phase_seconds().items()}
    return sum(phases.get(name, 0.0) for name in SAMPLING_PHASES) / sum(phases.values())


def target_alone(
    part: Part, model: PreTrainedModel, runner: Literal["auto", "compiled"], length: int, batches: Sequence[int]
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
    with stopwatch(part.device) as making:
        drafter = SelfDrafter(model, config.draft_quantization, config.draft_kernel, head)
    bench = _Bench(model, drafter, max(batches), [length], MARGIN, config)
    try:
        cells = time_cells(part, bench, batches, length)
        share = sampling_share(bench, max(batches), length)
    finally:
        bench.close()
    with stopwatch(part.device) as refreshing:
        drafter.quantized.refresh()
    layers = drafter.quantized.layers.values()
    return {
        "seconds": cells,
        "sampling_share": share,
        "making_the_drafter_seconds": making.value,  # the first one on a machine also measures the kernels
        "refresh_seconds": refreshing.value,
        "draft_max_rows": drafter.max_rows,
        "kernels": sorted({layer.packed.name for layer in layers if isinstance(layer, QuantizedLinear)}),
        "graphs": bench._rollout.target.captured,
        "ratios": {
            batch: {
                "T_q / T_p": cells["draft"][batch] / target if batch in cells.get("draft", {}) else None,
                "T_V / T_p": cells["verify"][batch] / target,
            }
            for batch, target in cells["target"].items()
        },
    }


def believed(model: PreTrainedModel, batches: Sequence[int], length: int) -> Seconds:
    """What a probe predicts."""
    rounds = probe(model, [SelfDrafter(model, packs_later=True)], SpeculativeConfig())
    found: Seconds = {"target": {}, "draft": {}, "verify": {}}
    for batch in batches:
        verify = rounds({}, DRAFT_LENGTH, batch, length)
        whole = rounds({"self": DRAFT_LENGTH}, DRAFT_LENGTH, batch, length)
        found["target"][batch], found["verify"][batch] = rounds({}, 0, batch, length), verify
        found["draft"][batch] = (whole - verify) / DRAFT_LENGTH
    return found


def over(believed: Seconds, taken: Seconds) -> Seconds:
    """Believed over taken, and T_q / T_p believed over T_q / T_p taken, by batch."""
    found = {
        mode: {batch: cells[batch] / taken[mode][batch] for batch in cells if batch in taken[mode]}
        for mode, cells in believed.items()
        if mode in taken
    }
    if "draft" in found:
        found["T_q / T_p"] = {batch: share / found["target"][batch] for batch, share in found["draft"].items()}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("rounds", __doc__, arguments)
    length, batches = (64, (1, 2)) if part.is_smoke else (LENGTH, BATCHES)
    part.state(dtype="bfloat16", length=length, draft_length=DRAFT_LENGTH)
    model = random_model(config_of(part.shape), part.device, torch.bfloat16, part.seed)
    bandwidth, weights, kv = copy_bandwidth(part.device), read_bytes(model), model_constants(model).kv_bytes
    roofline = {batch: (weights + batch * length * kv) / bandwidth for batch in batches}
    part.record("roofline", {"copy_bandwidth": bandwidth, "read_weight_bytes": weights, "seconds": roofline})

    def alone(runner: Literal["auto", "compiled"]) -> None:
        found = part.measure(f"target, {runner}", partial(target_alone, part, model, runner, length, batches))
        if found is not None:
            part.record(f"T_p over weight bytes / copy bandwidth, {runner}", found[1] * bandwidth / weights)

    with torch.no_grad():
        probed = batches[::3] if len(batches) > 2 else batches
        beliefs = {
            name: part.measure(f"probe, {name}", partial(believed, model, probed, length))
            for name in ("first", "second")
        }
        alone("auto")
        heads: tuple[Literal["packed", "dense"], ...] = ("packed", "dense")
        taken = {head: part.measure(f"head {head}", partial(with_head, part, model, head, length, batches))
                 for head in heads}  # fmt: skip
        for name, belief in beliefs.items():
            if belief is not None and taken["packed"] is not None:
                part.record(f"believed over taken, {name}", over(belief, taken["packed"]["seconds"]))
        if part.device.type == "cuda":
            alone("compiled")
        else:
            part.skip("target, compiled", "needs a GPU")
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
