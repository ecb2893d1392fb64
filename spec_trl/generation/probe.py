"""Guesses the seconds of rounds within a fraction of a second, from timed forwards or layers."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..quantization.awq import ActivationAware
from ..quantization.linear import QuantizedLinear
from .engine.cuda.graph_capture import CudaRecorder, Outputs
from .engine.drafter import Drafter
from .engine.forwards import runner_choice
from .engine.forwards.cpu_runner import cpu_runner
from .engine.forwards.model_costs import model_constants
from .engine.forwards.runner import COLUMN_BUCKET, EagerRunner
from .engine.kv.cache import autocast_dtype
from .engine.network.family import Family
from .engine.network.products import lend_copies, take_copies_back
from .options import SpeculativeConfig
from .planner.clock import ForwardSeconds, ProbedRounds
from .session import Session


TOKENS = (1, 4, 16, 64)  # of the timed forwards
REPLAYS = 3  # of a captured forward: each costs the device the same
CALLS = 4  # the fastest counts: the first call compiles, and other work only slows calls
ENOUGH = 0.02  # seconds of the faster of two calls: a slower layer is not called again
Layer: TypeAlias = QuantizedLinear | nn.Linear | Conv1D


def probe(model: PreTrainedModel, drafters: Sequence[Drafter], config: SpeculativeConfig) -> ProbedRounds:
    """Times forwards of `model` and of its quantized copy among `drafters`, over the few columns of short texts, as
    `config.runner` runs them. Other networks count by their share of the target's bytes.

    Captured forwards are replayed: the device's work with the real weights. Else products are timed, one per shape,
    and a whole forward of one token: its seconds beyond its products (Python, norms, attention, uncached weights) are
    added to every forward.
    """
    mode, recorder = runner_choice.runner_mode(config, model.device), None
    if runner_choice.captures(config, model.device):
        recorder = runner_choice.recorder_for(model.device)
    cache = Family.of(model).cache.for_network(model, TOKENS[-1], COLUMN_BUCKET)
    make = cpu_runner if recorder is None and mode == "compiled" else EagerRunner
    with torch.no_grad():
        runner = make(runner_choice.shadow_for(Session(), model), cache)
        target = _captured(runner, recorder) or _of_products(runner, model)
        found = {}
        for drafter in drafters:
            for copied in drafter.policy_copies:
                lend_copies(runner.network, copied.network)
                try:
                    copy = make(copied.network, cache)
                    found[drafter.strategy] = _captured(copy, recorder) or _of_products(copy, model, copied.is_stale)
                finally:
                    take_copies_back(copied.network)
            if not drafter.policy_copies and drafter.cost is not None:
                share = drafter.cost.weight_bytes / drafter.cost.tokens / model_constants(model).weight_bytes
                found[drafter.strategy] = target.scaled(share)
    return ProbedRounds(target, found)


def _captured(runner: EagerRunner, recorder: CudaRecorder | None) -> ForwardSeconds | None:
    """Times replays; None: forwards are not captured, or cannot be because this network waits for the device."""
    if recorder is None:
        return None
    seconds = []
    try:
        for tokens in TOKENS:
            forward = _forward_of(runner, tokens)
            forward()  # compiles and loads, outside the clock
            recording = recorder.record(partial(_outputs, forward))
            seconds.append(recorder.seconds(recording.replay, REPLAYS))
    except Exception:  # it will run eagerly, with a warning that says why
        return None
    return ForwardSeconds(TOKENS, seconds)


def _of_products(runner: EagerRunner, model: PreTrainedModel, packs: bool = False) -> ForwardSeconds:
    """Times products, and the rest of a forward of one token. An unpacked copy computes as fast."""
    products = _products(runner.network, model, packs)
    return products.scaled(plus=max(seconds_of(_forward_of(runner, 1), model.device) - products(1), 0.0))


def _outputs(forward: Callable[[], Tensor]) -> Outputs:
    return forward(), None


def _forward_of(runner: EagerRunner, tokens: int) -> Callable[[], Tensor]:
    zeros = torch.zeros(tokens, 1, dtype=torch.int64, device=runner.network.device)  # [B, 1]
    return partial(runner.forward, zeros, zeros, 1)


def _products(network: nn.Module, model: PreTrainedModel, packs: bool = False) -> ForwardSeconds:
    """Times all products of the target's network or of its copy. `packs`: whether layers of the copy are unpacked.

    A layer that occurs once, such as a head, counts by its weights and the largest repeated layer of its type: packing
    and timing a large head would take longer than everything else.
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
            timed[like] = _layer(like, model, packs)
        count = (1 + len(others)) * first.weight.numel() / like.weight.numel()
        totals = [total + count * own for total, own in zip(totals, timed[like], strict=True)]
    return ForwardSeconds(TOKENS, [max(each, 1e-9) for each in totals])


def _layer(layer: Layer, model: PreTrainedModel, packs: bool) -> list[float]:
    width = layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features
    dtype = layer.weight.dtype if layer.weight.is_floating_point() else model.dtype
    if isinstance(layer, QuantizedLinear):  # the copy is packed at its first draft, if any
        if packs:
            layer.refresh(ActivationAware())
        dtype = model.dtype
    dtype = autocast_dtype(model.device) or dtype
    seconds: list[float] = []
    for tokens in TOKENS:
        if len(seconds) > 2 and seconds[-1] > ENOUGH:  # a slow machine: continue as a straight line
            seconds.append(ForwardSeconds(TOKENS[: len(seconds)], seconds)(tokens))
            continue
        x = torch.zeros(tokens, width, dtype=dtype, device=model.device)  # [tokens, in]
        seconds.append(seconds_of(partial(layer, x), model.device))
    return seconds


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest call of `work`."""
    best, calls = float("inf"), 0
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    while calls < 2 or calls < CALLS and best < ENOUGH:
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        best, calls = min(best, time.perf_counter() - started), calls + 1
    return best
