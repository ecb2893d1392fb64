"""A first guess of what rounds take, in a fraction of a second: each kind of layer is timed once."""

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..generation.drafters.self_copy import SelfDrafter
from ..generation.drafters.tts.drafter import DistilledDrafter
from ..generation.engine.cache import autocast_dtype
from ..generation.engine.drafter import Drafter
from ..generation.engine.model_costs import model_constants
from ..generation.engine.shadow import share_weights
from ..quantization.awq import ActivationAware
from ..quantization.linear import QuantizedLinear
from ..scheduling.round_costs import ForwardSeconds, ProbedRounds


TOKENS = (1, 4, 16, 64)  # of the forwards that are timed
CALLS = 4  # of which the fastest counts: the first compiles, and other work can only make one slower
ENOUGH = 0.02  # seconds of the faster of two calls, then a layer is not called again
Layer: TypeAlias = QuantizedLinear | nn.Linear | Conv1D


def probe(model: PreTrainedModel, drafters: Sequence[Drafter]) -> ProbedRounds:
    """Times the products of `model` and of its quantized copy among `drafters`, one for each shape. Other networks are
    taken to cost their share of the target's bytes."""
    with torch.no_grad():
        target = _forward(model, model)
        found = {}
        for drafter in drafters:
            student = drafter.student if isinstance(drafter, DistilledDrafter) else drafter
            if isinstance(student, SelfDrafter):
                found[drafter.strategy] = _forward(student.network, model)
            elif drafter.cost is not None:
                share = drafter.cost.weight_bytes / drafter.cost.tokens / model_constants(model).weight_bytes
                found[drafter.strategy] = target.times(share)
    return ProbedRounds(target, found)


def _forward(network: nn.Module, model: PreTrainedModel) -> ForwardSeconds:
    """Of the target, or of its copy.

    A layer that is there once, as a head is, takes as long for each weight as the largest of its type that is there
    more often: packing and timing a large head would take longer than all the rest.
    """
    alike: dict[object, list[Layer]] = {}
    for module in network.modules():
        if isinstance(module, Layer):
            alike.setdefault((type(module), module.weight.shape, module.weight.dtype), []).append(module)
    largest: dict[type, Layer] = {}
    for first, *others in sorted(alike.values(), key=lambda own: own[0].weight.numel()):
        if others:
            largest[type(first)] = first
    timed: dict[Layer, list[float]] = {}
    totals = [0.0] * len(TOKENS)
    for first, *others in alike.values():
        like = first if others else largest.get(type(first), first)
        if like not in timed:
            timed[like] = _layer(like, model)
        count = (1 + len(others)) * first.weight.numel() / like.weight.numel()
        totals = [total + count * own for total, own in zip(totals, timed[like], strict=True)]
    return ForwardSeconds(TOKENS, [max(each, 1e-9) for each in totals])


def _layer(layer: Layer, model: PreTrainedModel) -> list[float]:
    """Seconds for each of `TOKENS`."""
    width = layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features
    dtype = layer.weight.dtype if layer.weight.is_floating_point() else model.dtype
    if isinstance(layer, QuantizedLinear):  # the copy is packed when it drafts, and may never
        layer.refresh(ActivationAware())
        dtype = model.dtype
    else:
        layer = share_weights(layer)  # as the engine runs it
    dtype = autocast_dtype(model.device) or dtype
    seconds: list[float] = []
    for tokens in TOKENS:
        if len(seconds) > 2 and seconds[-1] > ENOUGH:  # a slow machine: on along a straight line
            seconds.append(ForwardSeconds(TOKENS[: len(seconds)], seconds)(tokens))
            continue
        x = torch.zeros(tokens, width, dtype=dtype, device=model.device)  # [tokens, in]
        seconds.append(seconds_of(layer, x))
    return seconds


def seconds_of(layer: nn.Module, x: torch.Tensor) -> float:
    """Seconds of the fastest call of `layer` on `x` `[tokens, in]`."""
    best, calls = float("inf"), 0
    while calls < 2 or calls < CALLS and best < ENOUGH:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        started = time.perf_counter()
        layer(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        best, calls = min(best, time.perf_counter() - started), calls + 1
    return best
