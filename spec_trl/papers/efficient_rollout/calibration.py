"""Times this machine's rounds with the engine, and fits the roofline to them (ER App. E.3)."""

import gc
import itertools
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ...generation.drafters.self_copy import SelfDrafter
from ...generation.engine.cuda.graph_runner import CAPTURE_AFTER
from ...generation.engine.drafter import Drafter
from ...generation.engine.forwards.model_costs import model_constants
from ...generation.engine.forwards.runner_choice import captures, runner_for
from ...generation.engine.kv.base import Capacity
from ...generation.engine.kv.memory import free_memory
from ...generation.engine.network.family import Family
from ...generation.engine.requirements import position_limit
from ...generation.engine.rollout import RequestQueue, Rollout
from ...generation.engine.rows import PrefixView, Request, Rows
from ...generation.engine.sampling.accept import Proposal
from ...generation.engine.sampling.noise import RoundNoise
from ...generation.engine.sampling.processors import LogitsPipeline
from ...generation.engine.sampling.stopping import Stopping
from ...generation.measuring import NO_KERNEL, effective_dtype, profile_key
from ...generation.options import SpeculativeConfig
from ...generation.planner.control import Chain, NeverSpeculate
from ...generation.session import Session
from ...quantization.source_weight import SourceSpec, inspect_projection, is_projection
from .fit import GemmMeasurement, effective_flops, fit
from .profile import Profile
from .sweep import Mode, Sample


DRAFT_LENGTHS = (3, 7, 11)
BATCHES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
GEMM_ROWS = (256, 512, 1024)  # of GEMMs for F_eff: there compute bounds them
MEMORY_SHARE = 0.3  # share of the free memory for the sweep's K/V cache
FEWEST_ROUNDS, MOST_ROUNDS = 2, 15  # timed rounds of one visit to a cell; there are two visits


class RoundBench:
    """An engine whose requests never end, so that its rounds can be timed one by one.

    Args:
        drafters: named by index in a round's chains.
        prompts: `[B, n]`, int64, one per row. Rows begin with one more token.
        columns: of the cache, per row.
        config: names the runner.
        processors: of logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafters: Sequence[Drafter],
        prompts: Tensor,
        columns: int,
        config: SpeculativeConfig,
        rollout: type[Rollout] = Rollout,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        batch = len(prompts)
        Session.of(model).drop_runner()  # its K/V would take memory beside ours
        self._rows = Rows(batch, columns, model.device)
        view = PrefixView(self._rows, prompts)
        self._rollout = rollout(
            RequestQueue([Request(i, prompts[i], 2**62, i) for i in range(batch)]),
            runner_for(Session(), model, Family.of(model), config, Capacity(batch, columns)),
            drafters,
            NeverSpeculate(),
            self._rows,
            LogitsPipeline(LogitsProcessorList(processors), view, batch),
            Stopping(StoppingCriteriaList(), view),
            do_sample=True,
            rejection=False,
            want_logprobs=False,
            strategy="measuring",
        )
        self._captures = captures(config, model.device)
        self._rollout.begin()
        self._rollout.admit()

    def round(self, plan: Sequence[Chain]) -> float:
        """Decodes one round and returns its seconds. RuntimeError: a drafter failed."""
        started = time.perf_counter()
        self._rollout.decode_round(plan)
        seconds = time.perf_counter() - started
        if self._rollout.drafters.failure is not None:
            raise RuntimeError(f"the drafter failed while it was timed: {self._rollout.drafters.failure}")
        return seconds

    def close(self) -> None:
        self._rollout.end()
        if self._captures:
            gc.collect()  # a runner and its captured forwards reference each other


def warm_up_rounds(model: PreTrainedModel, config: SpeculativeConfig) -> int:
    """Number of untimed rounds per shape, to prepare kernels and captured forwards."""
    return CAPTURE_AFTER if captures(config, model.device) else 1


def bar_text(what: str, model: PreTrainedModel, kept_in: Path | None) -> str:
    """The text of a progress bar; `kept_in` adds that the work happens once."""
    return f"{what} {type(model).__name__}" + ("" if kept_in is None else f" (once; kept in {kept_in})")


def calibrate(
    model: PreTrainedModel,
    config: SpeculativeConfig | None = None,
    max_batch_size: int = 64,
    max_length: int = 4096,
    budget_seconds: float = 90.0,
    progress: bool = True,
    kept_in: Path | None = None,
) -> Profile:
    """Measures and fits a roofline profile for `model` and its quantized self-drafter on this machine.

    Whole decoding rounds are timed as rollouts run them: the target's time includes sampling, the verify time includes
    acceptance and bookkeeping. The K/V cache holds zeros, since its content does not change the time.

    Args:
        model: the target, on its decoding device.
        config: names the drafter's quantization, kernel and head.
        max_batch_size: most rows in flight.
        max_length: longest total length.
        budget_seconds: for the sweep; a large model on a slow machine may exceed it, with four times of every cell.
        progress: show a progress bar.
        kept_in: folder of the caller's profile, for the progress bar.

    Raises:
        ValueError: no kernel can hold the drafter's layers: there is nothing to calibrate.
    """
    config = config or SpeculativeConfig()
    key = profile_key(model, config, measures=True)
    if key.kernel == NO_KERNEL:
        raise ValueError(
            f"draft_kernel={config.draft_kernel!r} with draft_quantization={config.draft_quantization!r} can pack no "
            f"layer on {key.hardware}; choose another of them."
        )
    # A separate drafter, since the strategy may have none.
    drafter = SelfDrafter(model, config.draft_quantization, config.draft_kernel, config.efficient_rollout.lm_head)
    constants = model_constants(model, drafter.quantized, effective_dtype(model))
    bar = bar_text("calibrating this machine for", model, kept_in) if progress else None
    with torch.no_grad():
        flops = effective_flops(_time_gemms(model))
        bandwidth = _copy_bandwidth(constants.weight_bytes, model.device)
        samples = sweep(model, drafter, max_batch_size, max_length, budget_seconds, bar, config)
    roofline, diagnostics = fit(samples, constants, flops, bandwidth_bounds=(0.4 * bandwidth, 1.5 * bandwidth))
    if (signs := diagnostics.guessing) is not None:
        warnings.warn(
            f"the calibrated roofline says no better than guessing where speculation pays: at a speedup of "
            f"{signs.threshold:g} it agrees with {signs.accuracy:.0%} of the measured rounds, always guessing with "
            f"{signs.majority:.0%}. Calibrate again on a quiet machine, or with a larger budget.",
            stacklevel=2,
        )
    # Lists, not tuples: the profile equals the one that is read again.
    plain = json.loads(json.dumps(asdict(diagnostics))) | {"max_batch_size": max_batch_size, "max_length": max_length}
    return Profile(key, roofline, drafter.max_rows, plain, datetime.now(UTC).isoformat(timespec="seconds"), samples)


def _projections(model: PreTrainedModel) -> Iterator[SourceSpec]:
    for module in model.get_decoder().modules():
        if is_projection(module) and not isinstance(source := inspect_projection(module), str):
            yield source


def _time_gemms(model: PreTrainedModel) -> list[GemmMeasurement]:
    elements: Counter[tuple[int, int]] = Counter()  # by shape, all layers together
    for each in _projections(model):
        elements[each.out_features, each.in_features] += each.out_features * each.in_features
    dtype, measurements = effective_dtype(model), []
    for out_features, in_features in sorted(elements, key=elements.__getitem__, reverse=True)[:4]:
        weight = torch.randn(out_features, in_features, device=model.device).to(dtype)  # [out, in]
        for rows in GEMM_ROWS:
            x = torch.randn(rows, in_features, device=model.device).to(dtype)  # [rows, in]
            seconds = _seconds(partial(F.linear, x, weight), model.device)
            measurements.append(GemmMeasurement(f"{out_features}x{in_features}", rows, weight.numel(), seconds))
    return measurements


def _copy_bandwidth(size: float, device: torch.device) -> float:
    """Bytes per second that a copy of `size` bytes (at most 1 GiB) reads and writes; small models fit into caches."""
    source = torch.zeros(int(min(size, 2**30)) // 8 + 1, dtype=torch.int64, device=device)
    destination = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(partial(destination.copy_, source), device)


def _seconds(work: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(rounds + 2):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return median(times[2:])


def sweep(
    model: PreTrainedModel,
    drafter: SelfDrafter,
    max_batch: int,
    max_length: int,
    budget: float,
    bar: str | None,
    config: SpeculativeConfig,
) -> list[Sample]:
    """Times target, draft and verify over a grid that fits the machine, of at most `max_batch` rows of `max_length`
    tokens, a round's drafts included: in two passes through shuffled cells, within about `budget` seconds. `bar`: text
    of a progress bar, if any. RuntimeError: the drafter failed."""
    limit = position_limit(model)
    margin = max(DRAFT_LENGTHS) + 1  # tokens that a round may write
    longest = max((max_length if limit is None else min(max_length, limit)) - margin, 1)
    # The longest length matters most; lengths just below it add no information.
    lengths = [length for length in LENGTHS if 1.5 * length <= longest] + [longest]
    bench = _Bench(model, drafter, max_batch, lengths, margin, config)
    lengths = [length for length in lengths if length <= bench.longest]
    batches = [batch for batch in BATCHES if batch <= bench.capacity]
    cells = [
        (batch, length, gamma)
        for batch, length, gamma in itertools.product(batches, lengths, (0, *DRAFT_LENGTHS))
        # With more rows than the kernels serve no network drafts: one γ of verification is enough.
        if batch <= drafter.max_rows or gamma in (0, DRAFT_LENGTHS[1])
    ]
    random.Random(0).shuffle(cells)
    times: dict[tuple[int, float, int, Mode], list[float]] = {}
    deadline = time.perf_counter() + budget
    warm_ups = warm_up_rounds(model, config)
    visits = list(itertools.product(range(2), cells))
    for number, (visit, (batch, length, gamma)) in enumerate(tqdm(visits, bar, disable=bar is None)):
        share = max(deadline - time.perf_counter(), 0.0) / (len(visits) - number)
        for mode, seconds in bench.rounds(batch, length, gamma, share, warm_ups=0 if visit else warm_ups):
            times.setdefault((batch, float(length), gamma, mode), []).append(seconds)
    bench.close()
    return [Sample(*cell, seconds=median(values)) for cell, values in sorted(times.items())]


class _NoDrafter(Drafter):
    """Proposes arbitrary tokens, to time verification with more rows than kernels serve."""

    has_probabilities = False

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        return Proposal(rows.window(0, draft_length), torch.full_like(rows.lengths, draft_length))


class _Bench(RoundBench):
    """An engine with rows of any number and length, without reading texts."""

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        max_batch: int,
        lengths: list[int],
        margin: int,
        config: SpeculativeConfig,
    ) -> None:
        self.longest, self.capacity = lengths[-1], max_batch
        fitting = MEMORY_SHARE * free_memory(model.device) / model_constants(model).kv_bytes  # cached tokens
        while self.capacity * (self.longest + margin) > fitting and self.longest > lengths[0]:
            self.longest = lengths[lengths.index(self.longest) - 1]
        while self.capacity * (self.longest + margin) > fitting and self.capacity > 1:
            self.capacity //= 2
        self._drafter = drafter
        prompts = torch.zeros(self.capacity, 1, dtype=torch.int64)  # [B, 1]
        super().__init__(model, [drafter, _NoDrafter()], prompts, self.longest + margin, config)
        self._rows.tokens.random_(model.config.get_text_config(decoder=True).vocab_size)

    def rounds(
        self, batch: int, length: int, gamma: int, seconds: float, warm_ups: int
    ) -> Iterator[tuple[Mode, float]]:
        """Times rounds for about `seconds`, FEWEST_ROUNDS at least; yields the medians by mode."""
        drafting, resting = list[float](), list[float]()
        drafts = batch <= self._drafter.max_rows
        deadline = time.perf_counter() + seconds
        while len(drafting) < MOST_ROUNDS:
            if len(drafting) >= FEWEST_ROUNDS and time.perf_counter() > deadline:
                break
            rows = self._rows
            rows.set_active(batch)
            rows.indices = list(range(batch))
            rows.commit(np.full(batch, length), None)
            before = self._rollout.record.phase_seconds().get("draft", 0.0)
            whole = self.round([Chain(0 if drafts else 1, gamma)] if gamma else [])
            draft = self._rollout.record.phase_seconds()["draft"] - before
            if warm_ups:
                warm_ups -= 1
            else:
                drafting.append(draft)
                resting.append(whole - draft)
        if gamma == 0:
            yield "target", median(map(sum, zip(drafting, resting, strict=True)))
            return
        if drafts:
            yield "draft", median(drafting) / gamma
        yield "verify", median(resting)
