"""Requantizing the drafter of a policy after an optimizer step: seconds, into the buffers it already has."""

import gc
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.measure import peak_memory, stopwatch
from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.quantization import QuantizedLinear, QuantizedNetwork, quantize_projections

from .part import Part
from .shapes import config_of, random_model
from .timing import relative_error


REPEATS = 9
TOLERANCE = 0.2
"""Relative error of a 4-bit layer on Gaussian weights and inputs is about 0.1; stale weights would give about 1."""


def check(network: QuantizedNetwork, model: PreTrainedModel) -> dict[str, Any]:
    """That a refresh takes in changed weights, layer by layer, and moves no buffer.

    Raises:
        ArithmeticError: a layer does not multiply with the new weights, or a buffer moved.
    """
    layers = {name: layer for name, layer in network.layers.items() if isinstance(layer, QuantizedLinear)}
    addresses = [buffer.data_ptr() for layer in layers.values() for buffer in layer.packed.buffers()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    network.refresh()
    worst = 0.0
    for name, layer in layers.items():
        x = torch.randn(2, layer.in_features, device=model.device).to(layer.packed.activation_dtype)  # [2, in]
        error = relative_error(layer.packed.linear(x), F.linear(x, layer.weight.to(x.dtype)))
        if not error < TOLERANCE:
            raise ArithmeticError(f"{name}: relative error {error:.3g} after a refresh")
        worst = max(worst, error)
    if addresses != [buffer.data_ptr() for layer in layers.values() for buffer in layer.packed.buffers()]:
        raise ArithmeticError("a refresh moved a buffer, so captured graphs would read the old one")
    return {"worst_relative_error": worst, "layers": len(layers)}


def measure(part: Part, model: PreTrainedModel, head: str) -> dict[str, Any]:
    """Build once, refresh often."""
    network = quantize_projections(make_shadow(model), lm_head=head)
    checked = check(network, model)
    with peak_memory(part.device) as peak:
        network.refresh()
    times = []
    for _ in range(2 if part.is_smoke else REPEATS):
        with stopwatch(part.device) as watch:  # wall clock and device: it is the rollout that waits
            network.refresh()
        times.append(watch.value)
    kernels = {layer.packed.name for layer in network.layers.values() if isinstance(layer, QuantizedLinear)}
    return checked | {
        "seconds": median(times),
        "by_pass": times,
        "weights": network.source_bytes // 2,
        "packed_bytes": network.packed_bytes,
        "peak_bytes": peak.value,  # next to policy and drafter
        "kernels": sorted(kernels),
        "dense_layers": network.dense_layers,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("refresh", __doc__, arguments)
    part.state(dtype="bfloat16", scheme="rtn-w4-g128")
    model = random_model(config_of(part.shape), part.device, torch.bfloat16, part.seed)
    for head in ("packed", "dense"):
        part.measure(f"head {head}", partial(measure, part, model, head))
        gc.collect()
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
