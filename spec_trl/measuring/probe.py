"""A first guess of what rounds take, in a fraction of a second: each kind of layer is timed once."""

import time
from collections.abc import Sequence

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
CALLS = 4  # of which the fastest counts: the first prepares kernels, and other work can only make one slower
ENOUGH = 0.02  # seconds after which a layer is not called again: 5 shapes, 2 networks, 4 TOKENS then take about 1


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
    """Of the target, or of its copy."""
    alike: dict[object, list[QuantizedLinear | nn.Linear | Conv1D]] = {}
    for module in network.modules():
        if isinstance(module, QuantizedLinear | nn.Linear | Conv1D):
            alike.setdefault((type(module), module.weight.shape, module.weight.dtype), []).append(module)
    autocast, totals = autocast_dtype(model.device), [0.0] * len(TOKENS)
    for first, *others in alike.values():
        width = first.weight.shape[0] if isinstance(first, Conv1D) else first.in_features
        if isinstance(first, QuantizedLinear):  # the copy is packed when it drafts, and may never
            first.refresh(ActivationAware())
            layer, dtype = first, model.dtype
        else:
            layer = share_weights(first)  # as the engine runs it
            dtype = first.weight.dtype if first.weight.is_floating_point() else model.dtype
        seconds: list[float] = []
        for tokens in TOKENS:
            if len(seconds) > 2 and seconds[-1] > ENOUGH:  # a large head on a slow machine: on along a straight line
                seconds.append(ForwardSeconds(TOKENS[: len(seconds)], seconds)(tokens))
                continue
            x = torch.zeros(tokens, width, dtype=autocast or dtype, device=model.device)  # [tokens, in]
            seconds.append(_seconds(layer, x))
        totals = [total + (1 + len(others)) * own for total, own in zip(totals, seconds, strict=True)]
    return ForwardSeconds(TOKENS, [max(each, 1e-9) for each in totals])


def _seconds(layer: nn.Module, x: torch.Tensor) -> float:
    best, spent, calls = float("inf"), 0.0, 0
    while calls < CALLS and spent < ENOUGH:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        started = time.perf_counter()
        layer(x)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds = time.perf_counter() - started
        best, spent, calls = min(best, seconds), spent + seconds, calls + 1
    return best
