"""The keyword `assistant_strategy`, and the decoding method behind it, which transformers' `custom_generate` hook
calls: it checks the call, chooses drafters and control, runs the rollout, and assembles the output."""

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from ..native.cpu_products import warn_of_slow_dtype
from ..native.native_code import untraced
from ..random_state import draw_seed, keeping_generators
from .engine import requirements
from .engine.cuda.graph_capture import SMALLEST_COLUMNS
from .engine.drafter import Drafter
from .engine.forwards.runner_choice import captures, exactness, free_for_cache, runner_for, runner_mode, takes_pool
from .engine.kv.base import PAGE_COLUMNS
from .engine.kv.cache import autocast_dtype
from .engine.kv.memory import check_memory, takes_memory_late
from .engine.kv.pages import PagedCache
from .engine.kv.row_memory import PagedRowMemory, RowMemory, RowNeeds, warn_of_little_memory
from .engine.kv.states import state_bytes
from .engine.lockstep import RolloutInStep
from .engine.network.attention import keeps_states
from .engine.network.image_prompts import IMAGES, ImagePrompt, have_offsets, image_prompts, take_inputs
from .engine.network.products import copied_bytes
from .engine.record import Completion
from .engine.requirements import check_input_ids, check_not_diverted
from .engine.rollout import Rollout
from .engine.rows import PrefixView, Request, RequestQueue, Rows
from .engine.sampling.neutral_settings import override
from .engine.sampling.noise import stream_keys
from .engine.sampling.processors import LogitsPipeline
from .engine.sampling.stopping import Stopping, must_run_in_step
from .engine.statistics import SpeculationStatistics
from .options import SpeculativeConfig, check_combination, check_strategy
from .planner.control import Control
from .registry import check_use
from .session import Session
from .strategies import (
    as_drafters,
    check_device,
    check_images,
    check_probabilities,
    check_races,
    check_states,
    control_for,
    decoupled,
    drafts_after_images,
    keep_acceptance,
    make_drafters,
)


_LIMIT_OVER_LENGTH = 4
"""Share of the length limit per row for which a pool has pages: lengths have a long tail, and with a mean of an eighth
of the limit rows took at most 0.16 of rows x limit (`kv_memory`, benchmarks/RESULTS.md)."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Result of `generate(assistant_strategy=..., return_dict_in_generate=True)`: the fields of `generate`'s own, of
    which only `sequences` is set, and others.

    Args:
        sequences: `[B, prompt width + new]` int64, prompts as passed, outputs right-padded.
        logprobs: `[B, new]` float32, log-probability (nats) of each sampled token under the processed target
            distribution; 0 after a row's end.
        lengths: `[B]` int64, generated tokens of each row, EOS included.
        statistics: of the generation.
    """

    logprobs: Tensor | None = None
    lengths: Tensor | None = None
    statistics: SpeculationStatistics | None = None


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
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """Batched, lossless speculative decoding, as `generate(custom_generate=speculative_decoding)` calls it.

    Args:
        model: the target.
        input_ids: `[B, width]` int64, left-padded.
        logits_processor: prepared by `generate`; acts as in `generate`.
        stopping_criteria: prepared by `generate`; acts as in `generate`.
        generation_config: prepared by `generate`.
        assistant_strategy: see :func:`~.check_strategy`.
        speculative_config: options, a :class:`SpeculativeConfig` or a dict of its fields.
        drafter: a drafter or several, instead of those of the strategy.
        request_ids: B ints that key the noise with the seed; by default 0..B. Two calls with the same seed and ids
            sample the same tokens.
        control: decides in every round which drafters draft; by default made from the config.
        make_queue: makes the queue of requests. A queue may share them with other ranks
            (:class:`~.SharedPool`); rows that another rank decodes have a length of 0 here.
        model_kwargs: `attention_mask` and other inputs that `generate` prepares.

    Returns:
        `[B, width + new]` int64, or a :class:`SpeculativeOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: the call cannot be served; raised before any work.
        FloatingPointError: the target's logits are NaN.
    """
    # `generate` gives a custom method no assistant and no streamer; the keyword's wrapper hands them over by these.
    assistant, streamer = model_kwargs.pop("_assistant", None), model_kwargs.pop("_streamer", None)
    image_inputs = model_kwargs.pop("_images", None)
    config, device, began = SpeculativeConfig.coerce(speculative_config), model.device, time.perf_counter()
    batch, width = input_ids.shape
    capacity = asked = min(batch, config.max_batch_size or batch)
    new_tokens = min([each.max_length for each in stopping_criteria if type(each) is MaxLengthCriteria]) - width
    do_sample = bool(generation_config.do_sample)
    rejects = do_sample and config.verification == "rejection"
    with Session.lend(model) as session, ExitStack() as claims, ExitStack() as preparation:
        preparation.enter_context(keeping_generators())
        snapshot = session.snapshot
        assert snapshot is not None
        # ---- checks before any work
        check_strategy(assistant_strategy)
        if drafter is None:
            check_combination(assistant_strategy, config)
        check_device(config, device, drafter)
        requirements.check_model(model, snapshot)
        if has_states := snapshot.find("has states", partial(keeps_states, model.config)):
            check_states(model, assistant_strategy, config)
        runner_mode(config, device)
        requirements.check_generation_config(generation_config)
        requirements.check_keywords(model, model_kwargs)
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        prompts = requirements.read_prompts(model, input_ids.long(), mask, positions)  # [length] each
        images: list[ImagePrompt | None] = [None] * batch
        if image_inputs:
            check_images(assistant_strategy, config, drafter)
            images = image_prompts(model, image_inputs, prompts, generation_config.num_return_sequences or 1)
        if request_ids is not None and len(request_ids) != batch:
            raise ValueError(f"request_ids has {len(request_ids)} entries for {batch} rows; give one int per row.")
        if streamer is not None and batch > 1:
            raise ValueError(f"streamer is given with {batch} rows; a streamer prints one row.")
        lengths = list(map(len, prompts))
        limit = snapshot.find("position limit", partial(requirements.position_limit, model))
        requirements.check_lengths(model, limit, lengths, new_tokens)
        in_step = must_run_in_step([*logits_processor, *stopping_criteria], batch, capacity)
        rejects = rejects and not in_step  # exact verification serves any draft

        # ---- drafters and control
        longest = max(lengths) + new_tokens
        if drafter is not None:
            drafters = as_drafters(drafter)
        elif config.sd_toggle == "never":
            drafters = []
        else:
            drafters = make_drafters(session, assistant_strategy, model, assistant, config)
            if image_inputs:  # other candidates of "auto" would read the images too
                drafters = [each for each in drafters if drafts_after_images(each)]
        for each in drafters:
            claims.enter_context(each.claim())
        if rejects:
            check_probabilities(drafters)
        if control is None:  # may calibrate the machine first
            entry = control_for(session, assistant_strategy, model, drafters, config, capacity, longest)
            control = entry.control
            if entry.known is not None:
                claims.callback(entry.known.keep)
        if rejects and control.races:
            raise ValueError(
                'verification="rejection" cannot be raced: chains that are accepted by chance disagree, and taking '
                'the longest would favour what is easy to draft. Use verification="exact", or one drafter per row.'
            )
        if has_states:
            check_races(model, control.races)
        # "none" gets the same columns: attention over another width would differ in the last bits.
        most_drafted = max(config.draft_length, control.most_drafted)
        columns = longest + most_drafted

        # ---- number of rows in flight, by memory
        in_pool = takes_pool(config, device, has_states)
        # One row shares memory with no other.
        free = free_for_cache(session, device) if in_pool or capacity > 1 else 0
        states = snapshot.find("states", partial(state_bytes, model)) if has_states else 0
        needs = RowNeeds.of(model, drafters, most_drafted + 1, capacity * longest, columns, in_pool, states)
        expected = columns if not has_states else -(-columns // SMALLEST_COLUMNS) * SMALLEST_COLUMNS
        if in_pool and not in_step:
            expected = min(max(columns // _LIMIT_OVER_LENGTH, max(lengths) + PAGE_COLUMNS), columns)
        graphs, most = 0.0, config.max_graph_memory * 2**30 if captures(config, device) else 0.0
        if most:  # little memory means fewer captured forwards before fewer rows
            graphs = needs.graph_memory(capacity, expected, free, most)
            needs = needs.with_graphs(graphs)
        if in_step:  # all rows stay to the end
            check_memory(f"K/V of {capacity} rows x {columns} columns", int(capacity * columns * needs.column), device)
        elif config.max_batch_size is None and (in_pool or not takes_memory_late(device)):
            capacity = min(capacity, needs.rows_that_fit(expected, free))
        if needs.states:
            at_once = 1 if takes_memory_late(device) and not in_step else capacity
            check_memory(f"the states of {at_once} of {capacity} rows", int(at_once * needs.states), device)
        if graphs < most:
            warn_of_little_memory(device, free, graphs, most, capacity, asked)
        if config.decoupled_execution != "never" and not image_inputs:
            drafters = decoupled(drafters, model, config, rejects, capacity, longest)
        for each in drafters:
            each.check_length(columns)
        snapshot.find("slow dtype", partial(warn_of_slow_dtype, model))
        pages = None if in_step or not in_pool else needs.pages_that_fit(capacity, free_for_cache(session, device))
        runner = runner_for(
            session, model, capacity, columns, config, pages, graphs,
            exact=config.exact is True, has_states=has_states,
            has_offsets=bool(image_inputs) and have_offsets(images),
        )  # fmt: skip
        copied = 0 if autocast_dtype(device) is None else copied_bytes(runner.network)
        rows = Rows(capacity, columns, device, shares_prompts=not has_states)
        memory: RowMemory | None = None
        if not in_step and isinstance(runner.cache, PagedCache):
            memory = PagedRowMemory(rows, runner.cache, most_drafted)
        elif not in_step and takes_memory_late(device) and capacity > 1:
            # The runner has made its copies of weights already.
            memory = RowMemory(rows, replace(needs, fixed=needs.fixed - copied))
        exact = None if image_inputs else exactness(snapshot, model, config, runner.network)  # which tries no images

        # ---- the rollout
        preparation.close()
        seed = config.seed if config.seed is not None else draw_seed()
        keys = torch.tensor(list(range(batch) if request_ids is None else request_ids), dtype=torch.int64)
        streams = stream_keys(seed, keys).tolist()
        requests = [
            Request(index, prompt, len(prompt) + new_tokens, streams[index], images=images[index], device=device)
            for index, prompt in enumerate(prompts)
        ]
        pad = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
        prefixes = PrefixView(rows, input_ids)
        make: Callable[..., Rollout] = Rollout
        queue = make_queue(requests)
        if memory is not None:
            memory.parked = queue.parked
        if in_step:
            ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)  # as generate asks
            make = partial(RolloutInStep, padding=pad if ends else None)
        rollout = make(
            queue, runner, drafters, control, rows,
            LogitsPipeline(logits_processor, prefixes, batch),
            Stopping(stopping_criteria, prefixes),
            do_sample=do_sample,
            rejection=rejects,
            want_logprobs=bool(generation_config.return_dict_in_generate),
            strategy=assistant_strategy,
            on_tokens=None if streamer is None else partial(_stream, streamer),
            memory=memory,
        )  # fmt: skip
        try:
            completions, statistics = rollout.run()
        except BaseException:
            with suppress(Exception):
                rollout.end()
            session.shadow = None
            session.drop_runner()  # its cache may hold broken K/V
            raise
        statistics.exact, statistics.copied_bytes = exact, copied
        statistics.setup_seconds = time.perf_counter() - began - statistics.seconds
        if config.decoupled_execution != "never":
            keep_acceptance(session, drafters, statistics)
        session.check_shadow()
        del rollout, runner, memory
        if not config.keep_graphs:
            session.drop_runner()
    if streamer is not None:
        streamer.end()
    return _assemble(input_ids, pad, completions, statistics, bool(generation_config.return_dict_in_generate))


def _stream(streamer: BaseStreamer, tokens: Tensor) -> None:
    """Gives `tokens` `[n]` to the streamer as `generate` does: one by one, `[1]` each."""
    for token in tokens.cpu().split(1):
        streamer.put(token)


def _assemble(
    input_ids: Tensor,
    pad_token_id: int,
    completions: list[Completion | None],
    statistics: SpeculationStatistics,
    return_dict: bool,
) -> SpeculativeOutput | Tensor:
    """Pads prompts and completions to rectangles."""
    lengths = torch.tensor([0 if completion is None else len(completion.tokens) for completion in completions])  # [B]
    new = torch.full((len(completions), int(lengths.max())), pad_token_id, dtype=input_ids.dtype)  # [B, new]
    logprobs = torch.zeros(new.shape)  # [B, new]
    for row, completion in enumerate(completions):
        if completion is None:
            continue
        new[row, : lengths[row]] = completion.tokens
        if completion.logprobs is not None:
            logprobs[row, : lengths[row]] = completion.logprobs
    device = input_ids.device
    sequences = torch.cat([input_ids, new.to(device)], dim=1)
    if not return_dict:
        return sequences
    return SpeculativeOutput(
        sequences=sequences, logprobs=logprobs.to(device), lengths=lengths.to(device), statistics=statistics
    )


_SIGNATURE = inspect.signature(speculative_decoding)
_generate: Callable[..., Any] | None = None
DEFAULTS: "WeakKeyDictionary[Any, Callable[..., Any]]" = WeakKeyDictionary()
"""Functions by model that run a call without a decoding method; they get plain `generate` and the call's arguments."""
UNDONE_WITH_IT = list[Callable[[], None]]()
"""Take back what else was changed in transformers, when the keyword is taken away."""


def install() -> None:
    """Teaches `GenerationMixin.generate` the keyword `assistant_strategy`; importing spec_trl does it."""
    global _generate
    if _generate is not None:
        return
    _generate = original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(
        self: Any,
        *args: Any,
        assistant_strategy: str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        custom = kwargs.get("custom_generate")
        is_other = custom is not None and custom is not speculative_decoding
        if is_other and assistant_strategy is not None:
            raise ValueError("custom_generate and assistant_strategy both name a decoding method; pass one of them.")
        if not is_other:  # arguments precede configs
            assistant_strategy = setting("assistant_strategy", assistant_strategy, self, args, kwargs)
        is_argument = speculative_config is not None
        speculative_config = setting("speculative_config", speculative_config, self, args, kwargs)
        if assistant_strategy is None and custom is not speculative_decoding:
            if is_argument and not is_other:
                raise ValueError("speculative_config is given without assistant_strategy; name a strategy.")
            if custom is None and (default := DEFAULTS.get(self)) is not None:
                return default(original, self, args, kwargs)
            return original(self, *args, **kwargs)
        strategy = check_strategy("self" if assistant_strategy is None else assistant_strategy)
        config = SpeculativeConfig.coerce(speculative_config)
        if kwargs.get("drafter") is None:  # else a config with other options
            check_use(strategy, config)
        if len(args) > 1:  # more than the prompts
            args, kwargs = (), dict(zip(list(inspect.signature(original).parameters)[1:], args, strict=False)) | kwargs
        _prepare_call(self, args, kwargs)
        # `generate` would encode images with the modules of the policy, which may train.
        image_inputs = {} if IMAGES.isdisjoint(kwargs) else take_inputs(kwargs)
        kwargs["custom_generate"] = custom = functools.partial(
            speculative_decoding,
            assistant_strategy=strategy,
            speculative_config=config,
            # generate() gives a custom method no assistant and no streamer, and refuses an assistant together with
            # num_return_sequences. Private keywords pass them on.
            _assistant=kwargs.pop("assistant_model", None),
            _streamer=kwargs.get("streamer"),
            _images=image_inputs,
        )
        custom.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # generate asks for it twice
        return original(self, *args, **kwargs)

    GenerationMixin.generate = generate


def uninstall() -> None:
    """Removes the keyword; `custom_generate=spec_trl.speculative_decoding` still works."""
    global _generate
    if _generate is not None:
        GenerationMixin.generate = _generate
        _generate = None
    while UNDONE_WITH_IT:
        UNDONE_WITH_IT.pop()()


def setting(name: str, value: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the argument `name`: its `value`, else the entry of the call's generation_config, else of the model's
    generation_config, as in `generate`. Configs carry unknown entries."""
    if name in kwargs:  # a keyword of `generate`
        return kwargs[name]
    of_call = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    for config in (of_call, getattr(model, "generation_config", None)):
        value = getattr(config, name, None) if value is None else value
    return value


def _prepare_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses or overrides arguments on which `generate` would act or fail before it calls the decoding method. Turns
    stop strings into a criterion, because `generate` does not pass the tokenizer on to a custom method. `args` has at
    most the prompts."""
    config = override(model, kwargs.pop("generation_config", None), kwargs)
    if config is not None:
        kwargs["generation_config"] = config
    prompts = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
    if prompts is not None:
        check_input_ids(prompts, model.device)
    check_not_diverted(setting("token_healing", None, model, args, kwargs), kwargs)
    if kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True cannot be combined with assistant_strategy: ranks take different numbers of rounds. "
            "Gather the weights around generate instead (TRL does so for ZeRO-3), and leave synced_gpus unset."
        )
    if stop_strings := setting("stop_strings", None, model, args, kwargs):
        move_stop_strings(stop_strings, kwargs)


def move_stop_strings(stop_strings: str | list[str], kwargs: dict[str, Any]) -> None:
    """Replaces `stop_strings` and the tokenizer among the keywords of a call of `generate` by a criterion."""
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} needs tokenizer=..., to match strings across tokens.")
    kwargs["stop_strings"] = None
    criteria = list(kwargs.pop("stopping_criteria", None) or [])
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])
