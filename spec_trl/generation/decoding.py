"""One call of speculative decoding: validate, prepare, roll out, assemble."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..dense_linear import warn_of_slow_dtype
from ..measuring.known_rounds import find_ladder, find_profile
from ..scheduling.control import Control, NeverSpeculate
from .configuration import SpeculativeConfig, check_combination, check_strategy
from .decoupling import check_device, decoupled, keep_acceptance
from .engine import requirements
from .engine.cache import PAGE_COLUMNS
from .engine.captured import GraphRunner
from .engine.drafter import Drafter, keep_drafters
from .engine.in_step import RolloutInStep
from .engine.kept_runner import (
    captures,
    exactness,
    free_for_cache,
    keep_runner,
    keep_shadow,
    runner_for,
    runner_mode,
    takes_pool,
)
from .engine.linear_layers import bytes_in_use
from .engine.memory import check_memory, takes_memory_late
from .engine.noise import stream_keys
from .engine.pages import PagedCache
from .engine.processors import LogitsPipeline, PrefixView
from .engine.record import Completion
from .engine.rollout import Rollout
from .engine.room import KVRoom, PoolRoom, RowNeeds, warn_of_little_memory
from .engine.rows import Request, RequestQueue, Rows
from .engine.runner import EagerRunner
from .engine.statistics import SpeculationStatistics
from .engine.stopping import Stopping, length_limit, must_run_in_step
from .registry import CHOOSING
from .strategies import as_drafters, keep_control, make_drafters, take_control


_LIMIT_OVER_LENGTH = 4
"""As many rows share a pool as it holds at this part of their limit: lengths have a long tail, and with an eighth of
the limit on average they took up to 0.16 of rows x limit (`kv_memory`, benchmarks/RESULTS.md)."""


@dataclass
class SpeculativeOutput(ModelOutput):
    """What `generate(assistant_strategy=..., return_dict_in_generate=True)` returns.

    Args:
        sequences: `[B, prompt width + new]` int64, prompts as given, outputs right-padded.
        logprobs: `[B, new]` float32, log-probability (nats) of each sampled token under the processed target
            distribution; 0 after a row's end.
        lengths: `[B]` int64, generated tokens of each row, EOS included.
        statistics: what the generation did.
    """

    sequences: Tensor | None = None
    logprobs: Tensor | None = None
    lengths: Tensor | None = None
    statistics: SpeculationStatistics | None = None


@dataclass(frozen=True)
class _Call:
    """The arguments of :func:`speculative_decoding`."""

    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    strategy: str
    config: SpeculativeConfig
    drafter: Drafter | Sequence[Drafter] | None
    request_ids: Sequence[int] | None
    control: Control | None
    make_queue: Callable[[list[Request]], RequestQueue]
    assistant: PreTrainedModel | str | None
    streamer: BaseStreamer | None

    @property
    def capacity(self) -> int:
        """Rows in flight."""
        return min(len(self.input_ids), self.config.max_batch_size or len(self.input_ids))

    @property
    def new_tokens(self) -> int:
        """Most tokens that a row may generate."""
        return length_limit(self.criteria) - self.input_ids.shape[1]

    @property
    def rejects(self) -> bool:
        """Whether rejection sampling verifies."""
        return self.config.verification == "rejection" and bool(self.generation_config.do_sample)

    @property
    def pad_token_id(self) -> int:
        """Fills rows up after their ends."""
        pad = self.generation_config._pad_token_tensor
        return int(pad) if pad is not None else 0


@torch.inference_mode(False)  # what is kept for the next call must not be bound to this one's inference mode
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
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """Batched, lossless speculative decoding, as `generate(custom_generate=speculative_decoding)` calls it.

    Args:
        model: the target.
        input_ids: `[B, width]` int64, left-padded.
        logits_processor: prepared by `generate`; acts as there.
        stopping_criteria: prepared by `generate`; acts as there.
        generation_config: prepared by `generate`.
        assistant_strategy: see :func:`~spec_trl.generation.configuration.check_strategy`.
        speculative_config: options, a :class:`SpeculativeConfig` or a dict of its fields.
        drafter: a drafter made before, or several, in place of the strategy's own.
        request_ids: B ints that key the noise with the seed; by default 0..B. Two calls with the same seed and the
            same ids sample the same tokens, whatever else differs.
        control: decides in each round which of the drafters given with it draft; by default one made from the config.
        make_queue: gives the requests of all rows to those in flight; some queues share them with other ranks
            (:class:`~spec_trl.distributed.pool.SharedPool`), and rows that these decode have a length of 0 here.
        model_kwargs: `attention_mask` and what else `generate` prepares.

    Returns:
        `[B, width + new]` int64, or a :class:`SpeculativeOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: the call asks for something that cannot be served; raised before any work.
        FloatingPointError: the target's logits are NaN.
    """
    # `generate` gives a custom method no assistant and no streamer; the keyword's wrapper hands them over by these.
    assistant, streamer = model_kwargs.pop("_assistant", None), model_kwargs.pop("_streamer", None)
    call = _Call(
        model, input_ids, logits_processor, stopping_criteria, generation_config, assistant_strategy,
        SpeculativeConfig.coerce(speculative_config), drafter, request_ids, control, make_queue, assistant,
        streamer,
    )  # fmt: skip
    prompts, in_step = _validate(call, model_kwargs)
    with ExitStack() as at_end:  # puts back what the call takes of what is kept for the model
        prepared = _prepare(call, prompts, in_step, at_end)
        exact = exactness(model, call.config, prepared[1].network)
        completions, statistics = _roll_out(call, *prepared)
    statistics.exact = exact
    if not call.config.keep_graphs and captures(call.config, model.device):
        gc.collect()  # a runner and what it captured hold each other
    return _assemble(call, completions, statistics)


def _validate(call: _Call, model_kwargs: dict[str, Any]) -> tuple[list[Tensor], bool]:
    """Refuses what cannot be served; returns prompts `[length]` int64 each, and whether rows must run in step."""
    model, batch = call.model, len(call.input_ids)
    check_strategy(call.strategy)
    if call.drafter is None:
        check_combination(call.strategy, call.config)
    check_device(call.config, model.device, call.drafter)
    requirements.check_model(model)
    runner_mode(call.config, model.device)
    requirements.check_generation_config(call.generation_config, model.generation_config)
    requirements.check_keywords(model, model_kwargs)
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    prompts = requirements.read_prompts(model, call.input_ids.long(), mask, positions)
    if call.request_ids is not None and len(call.request_ids) != batch:
        raise ValueError(f"request_ids has {len(call.request_ids)} entries for {batch} rows; give one int per row.")
    if call.streamer is not None and batch > 1:
        raise ValueError(f"streamer is given with {batch} rows; a streamer prints one row.")
    requirements.check_lengths(model, list(map(len, prompts)), call.new_tokens)
    drafts = bool(call.drafter) or call.strategy != "none"
    return prompts, must_run_in_step([*call.processors, *call.criteria], batch, call.capacity, drafts)


def _prepare(
    call: _Call, prompts: list[Tensor], in_step: bool, at_end: ExitStack
) -> tuple[Rollout, EagerRunner, list[Drafter], Control]:
    """Makes, or takes of what is kept, all that the rollout needs; `at_end` puts it back."""
    model, config, device = call.model, call.config, call.model.device
    if in_step:
        reason = "a processor or criterion is shown one step at a time"
        call = replace(call, drafter=[], control=NeverSpeculate(reason))
    longest = max(map(len, prompts)) + call.new_tokens
    drafters = _drafters_of(call, at_end)
    control = _control_of(call, drafters, longest, at_end) if call.control is None else call.control
    if call.rejects and control.races:
        raise ValueError(
            'verification="rejection" cannot be raced: chains that are accepted by chance disagree, and taking the '
            'longest would favour what is easy to draft. Use verification="exact", or one drafter per row.'
        )
    # "none" gets the same columns: attention over other widths would differ in the last bits.
    most_drafted = max(config.draft_length, control.most_drafted)
    columns, capacity = longest + most_drafted, call.capacity
    in_pool, asked = takes_pool(config, device), capacity
    free = free_for_cache(model) if in_pool or capacity > 1 else 0  # a single row needs no room that others leave it
    needs = RowNeeds.of(model, drafters, most_drafted + 1, capacity * longest, columns if in_pool else 0)
    expected = columns
    if in_pool and not in_step:
        expected = min(max(columns // _LIMIT_OVER_LENGTH, longest - call.new_tokens + PAGE_COLUMNS), columns)
    graphs, most = 0.0, config.max_graph_memory * 2**30 if captures(config, device) else 0.0
    if most:  # little memory makes them fewer before it makes the batch smaller
        graphs = needs.graph_memory(capacity, expected, free, most)
        needs = needs.with_graphs(graphs)
    if in_step:  # all rows stay to the end
        check_memory(f"K/V of {capacity} rows x {columns} columns", int(capacity * columns * needs.column), device)
    elif config.max_batch_size is None and (in_pool or not takes_memory_late(device)):
        capacity = min(capacity, needs.rows_that_fit(expected, free))
    warn_of_little_memory(device, free, graphs, most, capacity, asked)
    drafters = decoupled(drafters, model, config, call.rejects, capacity, longest)
    for drafter in drafters:
        drafter.check_length(columns)
    rows = Rows(capacity, columns, device)
    prefixes = PrefixView(rows, call.input_ids)
    warn_of_slow_dtype(model)
    pages = None if in_step or not in_pool else needs.pages_that_fit(capacity, free_for_cache(model))
    runner = runner_for(model, capacity, columns, config, pages, graphs, exact=config.exact is True)
    room: KVRoom | None = None
    if not in_step and isinstance(runner.cache, PagedCache):
        room = PoolRoom(rows, runner.cache, most_drafted)
    elif not in_step and takes_memory_late(device) and capacity > 1:
        room = KVRoom(rows, replace(needs, fixed=needs.fixed - bytes_in_use(runner.network)))  # which it has made
    streamer = call.streamer
    options: dict[str, Any] = dict(
        pipeline=LogitsPipeline(call.processors, prefixes, len(prompts)),
        stopping=Stopping(call.criteria, prefixes),
        do_sample=bool(call.generation_config.do_sample),
        rejection=call.rejects,
        want_logprobs=bool(call.generation_config.return_dict_in_generate),
        strategy=call.strategy,
        on_tokens=None if streamer is None else lambda tokens: streamer.put(tokens.cpu()),
        room=room,
    )
    make: Callable[..., Rollout] = Rollout
    if in_step:
        ends_by_token = any(hasattr(criterion, "eos_token_id") for criterion in call.criteria)  # as generate asks
        make = partial(RolloutInStep, padding=call.pad_token_id if ends_by_token else None)
    rollout = make(call.make_queue(_requests(call, prompts)), runner, drafters, control, rows, **options)
    return rollout, runner, drafters, control


def _requests(call: _Call, prompts: list[Tensor]) -> list[Request]:
    seed = call.config.seed if call.config.seed is not None else int(torch.randint(2**62, ()))
    ids = torch.tensor(list(range(len(prompts)) if call.request_ids is None else call.request_ids), dtype=torch.int64)
    return [
        Request(index, prompt.to(call.model.device), len(prompt) + call.new_tokens, stream)
        for index, (prompt, stream) in enumerate(zip(prompts, stream_keys(seed, ids).tolist(), strict=True))
    ]


def _drafters_of(call: _Call, at_end: ExitStack) -> list[Drafter]:
    """The drafters, for this call alone until `at_end`."""
    if call.drafter is not None:
        drafters = as_drafters(call.drafter)
    elif call.config.sd_toggle == "never":
        drafters = []
    else:
        drafters = make_drafters(call.strategy, call.model, call.assistant, call.config)
        at_end.callback(keep_drafters, call.model, drafters)
    for drafter in drafters:
        at_end.enter_context(drafter.claim())
        if call.rejects and not drafter.has_probabilities:
            raise ValueError(
                f'verification="rejection" needs draft probabilities, which {type(drafter).__name__} has none of. '
                'Use verification="exact".'
            )
    return drafters


def _control_of(call: _Call, drafters: list[Drafter], longest: int, at_end: ExitStack) -> Control:
    """The control of these drafters: one that is kept, or a new one, which may calibrate the machine first."""
    model, config = call.model, call.config
    predicts = config.sd_toggle in ("measured", "roofline") and bool(drafters)
    profile = find_profile(model, config, call.capacity, longest) if predicts else None
    lengths = config.choice_of_draft_lengths()
    ladder = None
    if predicts and call.strategy in CHOOSING:
        ladder = find_ladder(model, drafters, config, call.capacity, lengths)
    taken = take_control(model, drafters, config, lengths, profile, ladder, races=call.strategy == "best_of_n")
    at_end.callback(keep_control, model, taken)
    return taken.control


def _roll_out(
    call: _Call, rollout: Rollout, runner: EagerRunner, drafters: list[Drafter], control: Control
) -> tuple[list[Completion | None], SpeculationStatistics]:
    """Generates, and keeps for later calls what this one captured and measured."""
    try:
        completions, statistics = rollout.run()
    except BaseException:
        with suppress(Exception):
            rollout.end()
        raise  # the runner is not kept: its cache may hold broken or half-written K/V
    statistics.copied_bytes = bytes_in_use(runner.network)
    if not isinstance(runner, GraphRunner):
        keep_shadow(call.model, runner.network)
    elif call.config.keep_graphs:
        keep_runner(call.model, runner)
    if call.config.decoupled_execution != "never":
        keep_acceptance(call.model, drafters, statistics)
    if call.streamer is not None:
        call.streamer.end()
    return completions, statistics


def _assemble(
    call: _Call, completions: list[Completion | None], statistics: SpeculationStatistics
) -> SpeculativeOutput | Tensor:
    """Puts prompts and completions into rectangles."""
    lengths = torch.tensor([0 if completion is None else len(completion.tokens) for completion in completions])  # [B]
    new = torch.full((len(completions), int(lengths.max())), call.pad_token_id, dtype=call.input_ids.dtype)  # [B, new]
    logprobs = torch.zeros(new.shape)  # [B, new]
    for row, completion in enumerate(completions):
        if completion is None:
            continue
        new[row, : lengths[row]] = completion.tokens
        if completion.logprobs is not None:
            logprobs[row, : lengths[row]] = completion.logprobs
    device = call.input_ids.device
    sequences = torch.cat([call.input_ids, new.to(device)], dim=1)
    if not call.generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(sequences, logprobs.to(device), lengths.to(device), statistics)
