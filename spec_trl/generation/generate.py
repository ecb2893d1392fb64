"""Decodes for the keyword `assistant_strategy` of `generate`.

A call passes these components, in this order. None imports this file.

    check_call     call.py           checks the arguments: a frozen `Call`, or one error before any work
    make_drafting  strategies.py     the drafters of the call, and the control that decides when they draft
    plan_memory    row_memory.py     rows in flight, columns, pages, memory of captured forwards: a frozen `Capacity`
    runner_for     runner_choice.py  runs forwards of the target
    Rollout        rollout.py        draft, verify, accept and commit, until all rows have ended
    assemble       here              tokens and log-probabilities as rectangles
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..native.native_code import untraced
from ..papers import load
from .call import Call, check_call
from .engine.drafter import Drafter
from .engine.forwards.runner import EagerRunner
from .engine.forwards.runner_choice import exactness, runner_for, runner_mode
from .engine.kv.base import Capacity
from .engine.kv.cache import autocast_dtype
from .engine.kv.row_memory import plan_memory, watch_memory
from .engine.lockstep import RolloutInStep
from .engine.network.cpu_layers import compile_ahead
from .engine.network.products import copied_bytes
from .engine.record import Completion
from .engine.rollout import RequestQueue, Rollout
from .engine.rows import PrefixView, Request, Rows
from .engine.sampling.noise import draw_seed, keeping_generators, stream_keys
from .engine.sampling.processors import LogitsPipeline
from .engine.sampling.stopping import Stopping
from .engine.statistics import SpeculationStatistics
from .options import SpeculativeConfig
from .planner.control import Control
from .session import Session
from .strategies import make_drafting


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Result of `generate(assistant_strategy=..., return_dict_in_generate=True)`: of the fields of `generate`'s output
    only `sequences` is set.

    Args:
        sequences: `[B, prompt width + new]` int64, prompts as passed, outputs right-padded.
        logprobs: `[B, new]` float32, log-probabilities (nats) of sampled tokens under the processed target
            distribution; 0 after a row's end.
        lengths: `[B]` int64, generated tokens by row, EOS included.
        supports: by row `[length, ceil(vocabulary / 8)]` uint8 on the host, the tokens that the processors kept
            (:func:`~.support.pack`); Nones if not asked for.
        statistics: of the generation.
    """

    logprobs: Tensor | None = None
    lengths: Tensor | None = None
    statistics: SpeculationStatistics | None = None
    supports: list[Tensor | None] | None = None


@untraced
@torch.inference_mode(False)  # the session's tensors must not be inference tensors
@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_strategy: str = "self",
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
    drafter: Drafter | Sequence[Drafter] | None = None,
    request_ids: Sequence[int] | None = None,
    control: Control | None = None,
    make_queue: Callable[[list[Request]], RequestQueue] = RequestQueue,
    keep_supports: bool = False,
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """Batched, lossless speculative decoding, as `generate(custom_generate=speculative_decoding)` calls it.

    Args:
        model, input_ids: the target, and `[B, width]` int64, left-padded.
        logits_processor, stopping_criteria, generation_config: prepared by `generate`; act as in `generate`.
        assistant_strategy: the drafters, see docs/drafters.md.
        speculative_config: options, a :class:`SpeculativeConfig` or a dict of its fields.
        drafter: a drafter or several, instead of those of the strategy.
        request_ids: B ints that key the noise with the seed; by default 0..B. Equal seed and ids sample equal tokens.
        control: decides in every round when drafters draft; by default made from the config.
        make_queue: makes the queue. Rows that another rank of a :class:`~.SharedPool` decodes have a length of 0.
        keep_supports: whether to return supports; no row may move to another rank then.
        model_kwargs: `attention_mask` and other inputs that `generate` prepares.

    Returns:
        `[B, width + new]` int64, or a :class:`SpeculativeOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: the call cannot be served; before any work.
        FloatingPointError: the target's logits are NaN.
    """
    config, began = SpeculativeConfig.coerce(speculative_config), time.perf_counter()
    with Session.lend(model) as session, ExitStack() as claims:
        with keeping_generators():
            call = check_call(
                session, model, input_ids, logits_processor, stopping_criteria, generation_config,
                assistant_strategy, config, drafter, control, request_ids, model_kwargs,
            )  # fmt: skip
            if runner_mode(config, model.device) == "compiled":
                compile_ahead(model)
            drafters, control = make_drafting(session, call, claims)
            capacity = plan_memory(session, call, drafters, max(config.first_draft_length, control.most_drafted))
            ahead = config.specactor.decoupled_execution != "never" and load("papers.specactor.decoupled.execution")
            drafters = ahead.decoupled(drafters, call, capacity.rows) if ahead else drafters
            runner = runner_for(session, model, call.family, config, capacity, config.exact is True, call.has_offsets)
            copied = 0 if autocast_dtype(model.device) is None else copied_bytes(runner.network)
            # Tried without media: a family's forward reads such a prompt alone, whatever other rows there are.
            exact = exactness(call.snapshot, model, config)
        rollout = _rollout(call, capacity, drafters, control, runner, copied, make_queue, keep_supports)
        completions, statistics = _run(rollout, session)
        statistics.exact, statistics.copied_bytes = exact, copied
        statistics.setup_seconds = time.perf_counter() - began - statistics.seconds
        if ahead:
            ahead.keep_acceptance(session, drafters, statistics)
        session.check_shadow()
        del rollout, runner
        if not config.keep_graphs:
            session.drop_runner()
    return _assemble(call, completions, statistics)


def _rollout(
    call: Call,
    capacity: Capacity,
    drafters: Sequence[Drafter],
    control: Control,
    runner: EagerRunner,
    copied: int,
    make_queue: Callable[[list[Request]], RequestQueue],
    keep_supports: bool,
) -> Rollout:
    """Makes the rollout of `call`; draws a seed if the config has none. `copied`: bytes of copied weights."""
    device, settings = call.model.device, call.settings
    seed = call.config.seed if call.config.seed is not None else draw_seed()
    streams = stream_keys(seed, torch.tensor(list(call.request_ids), dtype=torch.int64)).tolist()
    media = call.media or [None] * len(call.prompts)
    queue = make_queue(
        [
            Request(index, prompt, len(prompt) + call.new_tokens, streams[index], media=media[index], device=device)
            for index, prompt in enumerate(call.prompts)
        ]
    )
    rows = Rows(capacity.rows, capacity.columns, device, shares_prompts=call.family.shares_prompts)
    memory = watch_memory(call, capacity, rows, runner.cache, copied)
    if memory is not None:
        memory.parked = queue.parked
    make: Callable[..., Rollout] = Rollout
    if control.several_chains:
        make = load("papers.specactor.racing_rollout").RacingRollout
    if call.in_step:
        ends = any(hasattr(criterion, "eos_token_id") for criterion in call.criteria)  # as generate asks
        make = partial(RolloutInStep, padding=call.padding if ends else None)
    prefixes = PrefixView(rows, call.input_ids)
    pipeline = LogitsPipeline(call.processors, prefixes, len(call.prompts))
    pipeline.keeps_support = keep_supports
    return make(
        queue, runner, drafters, control, rows, pipeline,
        Stopping(call.criteria, prefixes),
        do_sample=call.do_sample,
        rejection=call.rejects,
        want_logprobs=bool(settings.return_dict_in_generate),
        strategy=call.strategy,
        on_tokens=None if call.streamer is None else partial(_stream, call.streamer),
        memory=memory,
    )  # fmt: skip


def _run(rollout: Rollout, session: Session) -> tuple[list[Completion | None], SpeculationStatistics]:
    try:
        return rollout.run()
    except BaseException:
        with suppress(Exception):
            rollout.end()
        session.shadow = None
        session.drop_runner()  # its cache may hold broken K/V
        raise


def _stream(streamer: BaseStreamer, tokens: Tensor) -> None:
    """Gives `tokens` `[n]` to the streamer as `generate` does: one by one, `[1]` each."""
    for token in tokens.cpu().split(1):
        streamer.put(token)


def _assemble(
    call: Call, completions: list[Completion | None], statistics: SpeculationStatistics
) -> SpeculativeOutput | Tensor:
    if call.streamer is not None:
        call.streamer.end()
    input_ids, device = call.input_ids, call.input_ids.device
    lengths = torch.tensor([0 if completion is None else len(completion.tokens) for completion in completions])  # [B]
    new = torch.full((len(completions), int(lengths.max())), call.padding, dtype=input_ids.dtype)  # [B, new]
    logprobs = torch.zeros(new.shape)  # [B, new]
    for row, completion in enumerate(completions):
        if completion is None:
            continue
        new[row, : lengths[row]] = completion.tokens
        if completion.logprobs is not None:
            logprobs[row, : lengths[row]] = completion.logprobs
    sequences = torch.cat([input_ids, new.to(device)], dim=1)
    if not call.settings.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences, logprobs=logprobs.to(device), lengths=lengths.to(device), statistics=statistics,
        supports=[None if done is None else done.support for done in completions],
    )  # fmt: skip
