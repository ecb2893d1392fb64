"""Checks one call of `generate` before drafters are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from ..native.cpu_products import warn_of_slow_dtype
from ..value_checks import require_choice
from .engine import requirements
from .engine.drafter import Drafter
from .engine.forwards.runner_choice import captures
from .engine.network.family import Family
from .engine.network.media import MediaPrompt, media_prompts
from .engine.network.snapshot import Snapshot
from .engine.sampling.stopping import needing_rows
from .options import SpeculativeConfig
from .planner.control import Control
from .refusals import ALWAYS, MEDIA, REJECTION, STATES, Asked, Features, check, of_drafting
from .registry import CHOOSING, DRAFTERS, strategies
from .session import Session


@dataclass(frozen=True)
class Call:
    """One checked call of `generate`."""

    model: PreTrainedModel
    snapshot: Snapshot  # of the model
    strategy: str  # says who drafts, unless `drafters` do
    assistant: Any  # the `assistant_model`
    drafters: list[Drafter] | None  # instead of those of the strategy
    control: Control | None  # instead of the one that the config asks for
    config: SpeculativeConfig
    processors: LogitsProcessorList  # these three as `generate` prepared them
    criteria: StoppingCriteriaList
    settings: GenerationConfig
    input_ids: Tensor  # [B, width] int64 as passed, left-padded
    prompts: list[Tensor]  # B of [length] int64, without padding, on the host
    media: list[MediaPrompt | None] | None  # of each prompt; None: no prompt has any
    request_ids: Sequence[int]  # B, which key the noise with the seed
    streamer: BaseStreamer | None  # gets tokens as they are decoded
    new_tokens: int  # most generated tokens of a row
    longest: int  # most tokens of a row, its prompt included
    capacity: int  # most rows in flight, if memory holds them
    do_sample: bool  # False: greedy decoding
    rejects: bool  # rejection sampling verifies
    padding: int  # the token after the end of a row
    in_step: bool  # processors or criteria must see all rows at each step
    has_offsets: bool  # positions after some prompts are not columns (M-RoPE after media)
    family: Family  # of the model
    asked: Features = field(repr=False)


def check_call(
    session: Session,
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    settings: GenerationConfig,
    strategy: str,
    config: SpeculativeConfig,
    drafter: Drafter | Sequence[Drafter] | None,
    control: Control | None,
    request_ids: Sequence[int] | None,
    inputs: Mapping[str, Any],
) -> Call:
    """Checks the arguments of a call in its `session`; `inputs`: prepared by `generate`, and with underscores by the
    keyword. Raises ValueError, before any work, for a call that cannot be served."""
    inputs, snapshot = dict(inputs), session.snapshot
    assert snapshot is not None
    assistant, streamer = inputs.pop("_assistant", None), inputs.pop("_streamer", None)
    shown = inputs.pop("_media", ())
    batch, width = input_ids.shape
    capacity, do_sample = min(batch, config.max_batch_size or batch), bool(settings.do_sample)
    new_tokens = min([each.max_length for each in criteria if type(each) is MaxLengthCriteria]) - width
    if strategy not in DRAFTERS and strategy not in ("none", *CHOOSING):
        require_choice("assistant_strategy", strategy, strategies())
    drafters = None if drafter is None else as_drafters(drafter)
    needing = needing_rows([*processors, *criteria])
    rejects = do_sample and not needing and config.verification == "rejection"
    family = snapshot.find("family", partial(Family.of, model))
    asked = {
        **of_drafting(strategy, config, assistant, drafters),
        **of_model(family, config, model.device),
        ALWAYS: config.sd_toggle == "always" and control is None,
        REJECTION: rejects,
        MEDIA: bool(shown),
        "streamer": streamer is not None,
        "several rows": batch > 1 and f"{batch} rows",
        "a processor or criterion that may look at other rows": needing,
        "a smaller max_batch_size": capacity < batch and f"max_batch_size={capacity} for {batch} rows",
    }
    requirements.check_model(model, snapshot)
    check(asked)
    requirements.check_generation_config(settings)
    requirements.check_keywords(model, inputs)
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    prompts = requirements.read_prompts(model, input_ids.long(), mask, positions)
    media = media_prompts(model, shown, prompts, settings.num_return_sequences or 1) if shown else None
    if request_ids is not None and len(request_ids) != batch:
        raise ValueError(f"request_ids has {len(request_ids)} entries for {batch} rows; give one int per row.")
    lengths = list(map(len, prompts))
    limit = snapshot.find("position limit", partial(requirements.position_limit, model))
    requirements.check_lengths(model, limit, lengths, new_tokens)
    snapshot.find("slow dtype", partial(warn_of_slow_dtype, model))
    return Call(
        model, snapshot, strategy, assistant, drafters, control, config, processors, criteria, settings, input_ids,
        prompts=prompts,
        media=media,
        request_ids=range(batch) if request_ids is None else request_ids,
        streamer=streamer,
        new_tokens=new_tokens,
        longest=max(lengths) + new_tokens,
        capacity=capacity,
        do_sample=do_sample,
        rejects=rejects,
        padding=0 if settings._pad_token_tensor is None else int(settings._pad_token_tensor),
        in_step=bool(needing),
        has_offsets=media is not None and any(each is not None and each.offset for each in media),
        family=family,
        asked=asked,
    )  # fmt: skip


def of_model(family: Family, config: SpeculativeConfig, device: torch.device) -> dict[str, Asked]:
    """Features of a model of `family` on `device`."""
    place = f"the model on {device}"
    return {
        STATES: family.stateful and f"a model {family.stateful}",
        "a model on a GPU": device.type != "cpu" and place,
        'runner="graph"': config.runner == "graph",
        'runner="compiled"': config.runner == "compiled",
        "exact=True on a GPU": config.exact is True and device.type != "cpu",
        "a model outside of CUDA": lambda: not captures(config, device) and place,
    }


def as_drafters(given: Drafter | Sequence[Drafter]) -> list[Drafter]:
    """Returns the drafters of `generate(drafter=...)`; raises ValueError for other objects."""
    drafters = [given] if isinstance(given, Drafter) else given
    if not isinstance(drafters, list | tuple) or not all(isinstance(drafter, Drafter) for drafter in drafters):
        raise ValueError(
            f"drafter={given!r} is neither a Drafter nor a list of them; a strategy is named by assistant_strategy."
        )
    return list(drafters)
