"""A first guess of what rounds take, in a fraction of a second: each kind of layer is timed once."""

import time
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ..generation.drafters.self_copy import SelfDrafter
from ..generation.engine.cache import autocast_dtype
from ..generation.engine.drafter import Drafter
from ..generation.engine.model_costs import model_constants
from ..generation.engine.shadow import share_weights
from ..quantization.awq import ActivationAware
from ..quantization.linear import QuantizedLinear
from ..scheduling.round_costs import ForwardSeconds, ProbedRounds


TOKENS = (1, 4, 16, 64)  # of the forwards that are timed
CALLS = 4  # of which the fastest counts: the first prepares kernels, and other work can only make one slower
ENOUGH = 0.02  # seconds after which a layer is not called again: 5 shapes, 2 networks, 4 TOKENS then take about 1


def probe(model: PreTrainedModel, drafters: Sequence[Drafter]) -> ProbedRounds:
    """Times the products of `model` and of its quantized copy among `drafters`, one for each shape. Other networks are
    taken to cost their share of the target's bytes."""
    with torch.no_grad():
        target = _forward(model, model)
        found = {}
        for drafter in drafters:
            if isinstance(drafter, SelfDrafter):
                found[drafter.strategy] = _forward(drafter.network, model)
            elif drafter.cost is not None:
                share = drafter.cost.weight_bytes / drafter.cost.tokens / model_constants(model).weight_bytes
                found[drafter.strategy] = target.times(share)
    return ProbedRounds(target, found)


def _forward(network: nn.Module, model: PreTrainedModel) -> ForwardSeconds:
    """Of the target, or of its copy."""
    alike: dict[tuple[object, ...], list[nn.Linear | QuantizedLinear]] = {}
    for module in network.modules():
        if isinstance(module, nn.Linear | QuantizedLinear):
            alike.setdefault((type(module), module.in_features, module.out_features), []).append(module)
    dtype, totals = autocast_dtype(model.device) or model.dtype, [0.0] * len(TOKENS)
    for first, *others in alike.values():
        if isinstance(first, QuantizedLinear):  # the copy is packed when it drafts, and may never
            first.refresh(ActivationAware())
        else:
            first = share_weights(first)  # as the engine runs it
        for place, tokens in enumerate(TOKENS):
            totals[place] += (1 + len(others)) * _seconds(first, tokens, dtype, model.device)
    return ForwardSeconds(TOKENS, [max(each, 1e-9) for each in totals])


def _seconds(layer: nn.Linear | QuantizedLinear, tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    x = torch.zeros(tokens, layer.in_features, dtype=dtype, device=device)  # [tokens, in]
    best, spent, calls = float("inf"), 0.0, 0
    while calls < CALLS and spent < ENOUGH:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        layer(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        best, spent, calls = min(best, seconds), spent + seconds, calls + 1
    return best
