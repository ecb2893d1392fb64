"""The door: teaches `generate` the keyword `assistant_strategy`, through transformers' `custom_generate` hook."""

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

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
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..measuring.fill_ladder import find_ladder, keep_measured
from ..measuring.profile_cache import find_profile
from ..scheduling.control import Control, NeverSpeculate
from ..scheduling.toggle import SpeculationToggle
from .configuration import CHOOSE_BY_LADDER, SpeculativeConfig, check_strategy, check_verification
from .control import keep_control, make_control, take_control
from .engine.captured import GraphRunner, keep_runner, runner_for, runner_mode
from .engine.drafter import Drafter, keep_drafters
from .engine.in_step import RolloutInStep, must_run_in_step
from .engine.noise import stream_keys
from .engine.processors import LogitsPipeline, PrefixView
from .engine.requirements import (
    check_generation_config,
    check_keywords,
    check_lengths,
    check_model,
    check_not_diverted,
    check_not_empty,
    check_positions,
    split_prompts,
    without_modalities,
)
from .engine.rollout import Completion, Rollout
from .engine.rows import Request, Rows
from .engine.statistics import SpeculationStatistics
from .engine.stopping import Stopping, length_limit
from .strategies import as_drafters, make_drafters


@dataclass
class SpeculativeOutput(ModelOutput):
    """What `generate(assistant_strategy=..., return_dict_in_generate=True)` returns.

    Args:
        sequences: `[B, prompt width + new]` int64, prompts as given, outputs right-padded.
        logprobs: `[B, new]` float32, log-probability (nats) of each sampled token under the processed target
            distribution; 0 behind a row's end.
        lengths: `[B]` int64, generated tokens of each row, EOS included.
        statistics: what the generation did.
    """

    sequences: Tensor | None = None
    logprobs: Tensor | None = None
    lengths: Tensor | None = None
    statistics: SpeculationStatistics | None = None


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
        model_kwargs: `attention_mask` and what else `generate` prepares.

    Returns:
        `[B, width + new]` int64, or a :class:`SpeculativeOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: something here cannot be served; named before any work.
        FloatingPointError: the target's logits are NaN.
    """
    with ExitStack() as at_end:
        return _decode(
            at_end, model, input_ids, logits_processor, stopping_criteria, generation_config, assistant_strategy,
            speculative_config, drafter, request_ids, control, model_kwargs,
        )  # fmt: skip


def _decode(
    at_end: ExitStack,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_strategy: str,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None,
    drafter: Drafter | Sequence[Drafter] | None,
    request_ids: Sequence[int] | None,
    control: Control | None,
    model_kwargs: dict[str, Any],
) -> SpeculativeOutput | Tensor:
    """The same; `at_end` puts back what this call takes of what is kept for `model`, however it ends."""
    config = SpeculativeConfig.coerce(speculative_config)
    check_strategy(assistant_strategy)
    check_verification(assistant_strategy, config.verification)
    # Arrives here only through the wrapper of `install`: generate keeps these two from a custom decoding method.
    assistant: PreTrainedModel | str | None = model_kwargs.pop("_assistant", None)
    streamer: BaseStreamer | None = model_kwargs.pop("_streamer", None)
    check_model(model)
    runner_mode(config, model.device)
    check_generation_config(generation_config, model.generation_config)
    model_kwargs = without_modalities(model, model_kwargs)
    check_keywords(model_kwargs)
    prompts = split_prompts(input_ids, model_kwargs.get("attention_mask"))
    check_positions(model_kwargs.get("position_ids"), input_ids, model_kwargs.get("attention_mask"))
    batch, width = input_ids.shape
    if request_ids is not None and len(request_ids) != batch:
        raise ValueError(f"request_ids has {len(request_ids)} entries for {batch} rows; give one int per row.")
    if streamer is not None and batch > 1:
        raise ValueError(f"streamer is given with {batch} rows; a streamer prints one row.")
    new_tokens = length_limit(stopping_criteria) - width
    longest_prompt = max(len(prompt) for prompt in prompts)
    check_lengths(model, longest_prompt, longest_prompt + new_tokens)
    capacity = min(batch, config.max_batch_size or batch)
    in_step = must_run_in_step(
        [*logits_processor, *stopping_criteria], batch, capacity, drafts=bool(drafter) or assistant_strategy != "none"
    )
    if in_step:
        drafter, control = [], NeverSpeculate("a processor or criterion is shown one step at a time")
    if drafter is None:
        drafters = make_drafters(assistant_strategy, model, assistant, config) if config.sd_toggle != "never" else []
        at_end.callback(keep_drafters, model, drafters)
    else:
        drafters = as_drafters(drafter)
    for each in drafters:
        at_end.enter_context(each.claim())
    do_sample = bool(generation_config.do_sample)
    if config.verification == "rejection" and do_sample:
        for each in drafters:
            if not each.has_probabilities:
                raise ValueError(
                    f'verification="rejection" needs draft probabilities, which {type(each).__name__} has none of. '
                    'Use verification="exact".'
                )
    profile = None
    looks_at_times = config.sd_toggle in ("measured", "roofline")
    if control is None and looks_at_times and drafters:  # last: it may calibrate
        profile = find_profile(model, config, capacity, longest_prompt + new_tokens)
    chooses = assistant_strategy in CHOOSE_BY_LADDER and bool(drafters) and config.sd_toggle != "never"
    if control is None and (chooses or (drafters and looks_at_times)):
        ladder = find_ladder(model, drafters, config, capacity) if chooses else None
        own = config if assistant_strategy == "best_of_n" else replace(config, best_of_n_race=False)
        taken = take_control(model, drafters, own, profile, ladder)
        at_end.callback(keep_control, model, taken)
        control = taken.control
    elif control is None:
        control = make_control(drafters, config, profile)
    if config.verification == "rejection" and do_sample and control.races:
        raise ValueError(
            'verification="rejection" cannot be raced: chains that are accepted by chance disagree, and taking the '
            'longest would favour what is easy to draft. Use verification="exact", or one drafter per row.'
        )

    device = model.device
    ids = torch.tensor(list(request_ids) if request_ids is not None else range(batch), dtype=torch.int64)
    seed = config.seed if config.seed is not None else int(torch.randint(2**62, ()))
    streams = stream_keys(seed, ids).tolist()
    requests = [
        Request(index, prompt.to(device), len(prompt) + new_tokens, stream)
        for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True))
    ]
    # "none" gets the same columns: attention over other widths would differ in the last bits.
    columns = longest_prompt + new_tokens + max(config.draft_length, control.most_drafted)
    for each in drafters:
        each.check_length(columns)
    rows = Rows(capacity, columns, device)
    pad = generation_config._pad_token_tensor
    pad_token_id = int(pad) if pad is not None else 0
    prefixes = PrefixView(rows, input_ids)
    want_output = bool(generation_config.return_dict_in_generate)
    runner = runner_for(model, capacity, rows.columns, config)
    make_rollout: Callable[..., Rollout] = Rollout
    if in_step:
        ends_by_token = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)  # as generate asks
        make_rollout = functools.partial(RolloutInStep, padding=pad_token_id if ends_by_token else None)
    rollout = make_rollout(
        requests,
        runner,
        drafters,
        control,
        rows,
        LogitsPipeline(logits_processor, prefixes, batch),
        Stopping(stopping_criteria, prefixes),
        do_sample=do_sample,
        rejection=config.verification == "rejection",
        want_logprobs=want_output,
        strategy=assistant_strategy,
        on_tokens=None if streamer is None else lambda tokens: streamer.put(tokens.cpu()),
    )
    try:
        completions, statistics = rollout.run()
    except BaseException:
        with suppress(Exception):
            rollout.end()
        raise  # and the runner is not kept: its cache may hold broken or half-written K/V
    if config.keep_graphs:
        keep_runner(model, runner)
    if chooses and isinstance(control, SpeculationToggle) and (rungs := control.rungs()):
        keep_measured(model, drafters, config, rungs)
    if streamer is not None:
        streamer.end()
    if isinstance(runner, GraphRunner) and not config.keep_graphs:
        del rollout, runner
        gc.collect()  # a runner and what it captured hold each other
    output = _rectangular(input_ids, completions, pad_token_id, statistics)
    if want_output:
        return output
    assert output.sequences is not None
    return output.sequences


def _rectangular(
    input_ids: Tensor, completions: list[Completion], pad_token_id: int, statistics: SpeculationStatistics
) -> SpeculativeOutput:
    lengths = torch.tensor([len(completion.tokens) for completion in completions])  # [B]
    new = torch.full((len(completions), int(lengths.max())), pad_token_id, dtype=input_ids.dtype)  # [B, new]
    logprobs = torch.zeros(new.shape)
    for row, completion in enumerate(completions):
        new[row, : lengths[row]] = completion.tokens
        if completion.logprobs is not None:
            logprobs[row, : lengths[row]] = completion.logprobs
    device = input_ids.device
    return SpeculativeOutput(
        torch.cat([input_ids, new.to(device)], dim=1), logprobs.to(device), lengths.to(device), statistics
    )


_generate: Callable[..., Any] | None = None


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
        if assistant_strategy is None and custom is not speculative_decoding:
            if speculative_config is not None:
                raise ValueError("speculative_config is given without assistant_strategy; name a strategy.")
            return original(self, *args, **kwargs)
        if custom is not None and custom is not speculative_decoding:
            raise ValueError("custom_generate and assistant_strategy both name a decoding method; pass one of them.")
        prompts = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
        if isinstance(prompts, Tensor):  # generate itself may fail on empty ones first, with an IndexError
            check_not_empty(prompts)
        check_not_diverted(self, kwargs.get("generation_config", args[1] if len(args) > 1 else None), kwargs)
        if kwargs.get("synced_gpus"):
            raise ValueError(
                "synced_gpus=True cannot be combined with assistant_strategy: ranks take different numbers of rounds "
                "and cannot run their forwards in step. Gather the weights around generate instead (TRL does so for "
                "ZeRO-3), and leave synced_gpus unset."
            )
        strategy = check_strategy(assistant_strategy or "self")
        config = SpeculativeConfig.coerce(speculative_config)
        # generate hands neither an assistant nor a streamer to a custom method, and refuses an assistant next to
        # num_return_sequences; so they go around it.
        aside = {"_assistant": kwargs.pop("assistant_model", None), "_streamer": kwargs.get("streamer")}
        kwargs["custom_generate"] = functools.partial(_custom, strategy, config, aside)
        _move_stop_strings(self, args, kwargs)
        return original(self, *args, **kwargs)

    GenerationMixin.generate = generate


def uninstall() -> None:
    """Takes the keyword away again; `custom_generate=spec_trl.speculative_decoding` goes on working."""
    global _generate
    if _generate is not None:
        GenerationMixin.generate = _generate
        _generate = None


def _custom(
    strategy: str,
    config: SpeculativeConfig,
    aside: dict[str, Any],
    model: PreTrainedModel,
    input_ids: Tensor,
    drafter: Drafter | Sequence[Drafter] | None = None,
    request_ids: Sequence[int] | None = None,
    control: Control | None = None,
    **kwargs: Any,
) -> SpeculativeOutput | Tensor:
    return speculative_decoding(
        model,
        input_ids,
        assistant_strategy=strategy,
        speculative_config=config,
        drafter=drafter,
        request_ids=request_ids,
        control=control,
        **aside,
        **kwargs,
    )


def _move_stop_strings(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """generate builds stop strings with a tokenizer that a custom method keeps it from seeing: build them here."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None) or model.generation_config
    stop_strings = kwargs.pop("stop_strings", None) or given.stop_strings
    if not stop_strings:
        return
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} needs tokenizer=..., to match strings across tokens.")
    kwargs["stop_strings"] = None
    criteria = list(kwargs.pop("stopping_criteria", None) or [])
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])
