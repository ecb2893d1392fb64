"""Refuses by name, before any work, the models and settings that the engine cannot serve."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.fsdp import is_fsdp_managed_module

from .network.attention import STATELESS, MaskPlan
from .network.family import TOKEN_TYPES, Family, has_token_types
from .network.family_hooks import CACHE_NAMES, asks_for_length, cache_argument, position_tables, takes_positions
from .network.foreign_layers import check_foreign_layers
from .network.patches import unfollowed_patch
from .network.scans import follows_states
from .network.snapshot import Snapshot, snapshot_of
from .network.swap import unwrapped


if TYPE_CHECKING:
    from peft import PeftModel

TRANSFORMERS = ">=5.17,<5.25"
"""Releases of transformers that the tests ran with; pyproject.toml names the same."""

# Attention that is not a function of (query, key, position mask), or positions that no hook can reach.
_REFUSED_TYPES = {
    "roformer": "its rotary positions are one table for all rows",
    "kosmos-2": "its positions begin after the padding token's id",
    "dory": "its loops keep their K/V in copies of the cache's layers",
    "kosmos-2.5": "its positions begin after the padding token's id",
    "paligemma": "tokens of its prompts attend in both directions",
    "doge": "its masks depend on what the tokens say",
    "bloom": "its ALiBi positions need a two-dimensional mask",
    **dict.fromkeys(("xlm", "flaubert"), "it cuts its input by the length of a cache whose rows are all equally long"),
    "zamba": "its scans run head by head",
    "zaya": "its convolutions keep their states in ways of their own",
    **dict.fromkeys(
        ("inkling", "inkling_text", "inkling2_text", "inkling2_loop_text"),
        "its relative positions are counted from the length of a cache whose rows are all equally long",
    ),
    "mpt": "its ALiBi positions are counted back from the last cache column",
}
# Keywords that generate passes to a decoding method, and that the engine reads or may ignore.
_KNOWN_KEYWORDS = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "mm_encoder_outputs"}

_WAYS_OUT = {
    "assistant_ensemble_weight": "drafts change no token here",
    "cache_implementation": "rounded K/V change tokens, and the engine's are not rounded",
    "assistant_tokenizer": "assistants have the target's own tokenizer",
    "token_healing": "heal the prompts first: pass input_ids=model.heal_tokens(input_ids, tokenizer) and an "
    "attention_mask that is 0 at their padding",
    **dict.fromkeys(
        ("use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit"), "assistant_strategy says what drafts"
    ),
}
# Settings of generate with their values in sampling and greedy search; of others `keyword.py` says why they
# need not be served.
_SERVED: dict[str, tuple[object, ...]] = {
    "num_beams": (0, 1),
    "num_beam_groups": (0, 1),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "use_mtp": (False,),
    "token_healing": (False,),
    "assistant_early_exit": (),
    "prompt_lookup_num_tokens": (),
    "guidance_scale": (1,),
    "assistant_ensemble_weight": (),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}


def check_model(model: PreTrainedModel, snapshot: Snapshot | None = None) -> None:
    """Raises ValueError if `model` cannot be decoded over a ragged cache; `snapshot`: of the current model."""
    (snapshot or snapshot_of(model)).find("checked", partial(_check_model, model))


def _check_model(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; assistant_strategy serves decoder-only models."
        )
    config = model.config.get_text_config(decoder=True)
    for name in (model.config.model_type, config.model_type):
        if name in _REFUSED_TYPES:
            raise ValueError(f"model type '{name}' is not served: {_REFUSED_TYPES[name]}.")
    if obstacle := _obstacle(model, config):
        raise ValueError(f"model type '{config.model_type}' {obstacle}.")
    if (name := next((name for name, weight in model.named_parameters() if weight.is_meta), None)) is not None:
        raise ValueError(
            f"{name!r} and other weights lie on the meta device, as those that accelerate offloads to disk or CPU do "
            "between forwards. Load the model on one device."
        )
    _check_adapters(model)
    if (name := unfollowed_patch(model)) is not None:
        raise ValueError(
            f"the forward of {f'{name!r}' if name else 'the model'} was replaced by a function that reaches the model "
            "by a global variable, a container or an object, so the engine cannot redirect it. Use "
            "register_forward_hook, or let the new forward hold the old one in its closure."
        )
    check_foreign_layers(model)
    if is_fsdp_managed_module(model):
        raise ValueError(
            "the model is wrapped by FSDP, whose ranks would have to run their forwards in step. Use DDP, or gather "
            "the weights into a plain model."
        )
    places = set(getattr(model, "hf_device_map", {}).values())
    if len(places) > 1:
        raise ValueError(f"the model is spread over {sorted(map(str, places))}; load it on one device.")


def _obstacle(model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Returns why `model`, with the text config `config`, is not served, without the model's name; or None."""
    settings, decoder = vars(config), model.get_decoder()
    scripted = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    if name := next(scripted, None):
        return f"is not served with '{name}', a module of torch.jit: put back the module that it was made from"
    if settings.get("alibi"):
        return "with alibi=True is not served: ALiBi needs a two-dimensional mask"
    types = set(getattr(config, "layer_types", None) or ())
    has_states = Family(config).keeps_states or (model._is_stateful and not (types and types <= STATELESS))
    if has_states and not follows_states(model):
        return (
            "keeps a recurrent state in a way that is not known here, and rejected tokens must leave it. Generate "
            "without `assistant_strategy`, or with transformers 5.21 or newer where this release is older"
        )
    if not cache_argument(model):
        return f"is not served: its forward takes no K/V cache ({' or '.join(CACHE_NAMES)}){_renamed()}"
    attends = bool(MaskPlan.from_config(config).layer_types)
    if attends and not takes_positions(model) and not position_tables(model):
        return (
            "is not served: its forward takes no position_ids, and counts positions from the length of a cache whose "
            f"rows are all equally long{_renamed()}"
        )
    if attends and "max_position_embeddings" not in settings.keys() | config.attribute_map.keys():
        return "is not served: its config has no max_position_embeddings, so nothing says how long its rows may become"
    two_way = settings.get("use_bidirectional_attention")
    if two_way not in (None, False, "vision"):
        return f"attends in both directions (use_bidirectional_attention={two_way!r}), and drafts follow one"
    if not settings.get("is_causal", True):
        return "attends in both directions (is_causal=False), and drafts follow one"
    kinds: list[type] = [type(layer) for layer in decoder.modules()]
    if asking := next(filter(asks_for_length, kinds), None):
        return f"is not served: its {asking.__name__} asks the cache for one length, and rows have many"
    sees_both_ways = "create_bidirectional_mask" in vars(sys.modules[type(decoder).__module__])
    if settings.get("is_decoder") is False and sees_both_ways:
        return "attends in both directions; set config.is_decoder=True to make it a decoder"
    return None


def _renamed() -> str:
    """Explains an argument that every model's forward seems to lack; empty under tested versions."""
    if transformers.__version__ in SpecifierSet(TRANSFORMERS):
        return ""
    return (
        f". transformers {transformers.__version__} is installed, which may have renamed it. Install a version that "
        f"spec_trl is tested with: pip install 'transformers{TRANSFORMERS}'"
    )


def _check_adapters(model: PreTrainedModel) -> None:
    if "peft" not in sys.modules:  # not imported: no adapters, and no slow import
        return
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    # PeftModel.generate calls that of its base model; only this attribute shows a soft prompt.
    prepare = vars(model).get("prepare_inputs_for_generation")
    owner = prepare.__self__ if isinstance(prepare, MethodType) else None
    if isinstance(owner, PeftModel):
        _check_prompt_learning(owner)
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer) or layer.disable_adapters:
            continue
        variants = vars(layer).get("lora_variant", {})  # of LoRA layers; aLoRA's class is new in peft 0.18
        if any(type(variants.get(name)).__name__.startswith("ALora") for name in layer.active_adapters):
            raise ValueError(
                "the model has an activated LoRA (aLoRA), which acts from its invocation tokens on, and the engine's "
                "forwards do not say where in a row these stand. Use LoRA, or generate without `assistant_strategy`."
            )
        if any(isinstance(hook, partial) for hook in layer._forward_pre_hooks.values()):
            raise ValueError(
                "the call gives each row an adapter of its own (adapter_names, task_ids), and the engine reorders "
                "rows. Generate for one adapter at a time, or without `assistant_strategy`."
            )


def _check_prompt_learning(model: "PeftModel") -> None:
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            "the model has a PEFT adapter of prompt learning (prompt, prefix or p-tuning), whose virtual tokens "
            "assistant_strategy would lose. Use LoRA, or generate without `assistant_strategy`."
        )


def policy_in(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside the wrappers of torch.compile, PEFT and data parallelism; raises ValueError for a
    soft prompt of PEFT, which the inner model lacks."""
    policy: PreTrainedModel
    *_, policy = with_wrappers(model)
    return policy


def with_wrappers(model: nn.Module) -> Iterator[Any]:
    """`model`, then what it wraps, down to the result of :func:`policy_in`."""
    peft = sys.modules.get("peft")  # not imported: no PeftModel
    inside: nn.Module | None = model
    while inside is not None:
        yield (model := inside)
        inside = None
        if isinstance(model, DataParallel | DistributedDataParallel):
            inside = model.module
        elif peft is not None and isinstance(model, peft.PeftModel):
            _check_prompt_learning(model)
            inside = model.get_base_model()
        elif (compiled := unwrapped(model)) is not model:
            inside = compiled


def refusal(name: str, value: Any) -> ValueError:
    """The error for a setting of `generate` that cannot be served."""
    way_out = _WAYS_OUT.get(name)
    if name.startswith("output_"):
        way_out = "the output's .logprobs holds those of the sampled tokens"
    return ValueError(
        f"{name}={value!r} cannot be combined with assistant_strategy: the engine samples or decodes greedily over "
        f"its own cache. Leave it unset, or generate without assistant_strategy{'; ' + way_out if way_out else ''}."
    )


def check_not_diverted(heals: bool | None, keywords: Mapping[str, Any]) -> None:
    """Raises ValueError for steps of `generate`, with `keywords` and with `token_healing` if it `heals`, before a
    decoding method runs: it rewrites the prompts with a tokenizer, or withholds an assistant's tokenizer from a custom
    method."""
    if heals:
        raise refusal("token_healing", True)
    if keywords.get("assistant_tokenizer") is not None:
        raise refusal("assistant_tokenizer", type(keywords["assistant_tokenizer"]).__name__)


def check_generation_config(config: GenerationConfig) -> None:
    """Raises ValueError for modes of generate other than sampling and greedy search; `config` as completed by
    `generate`."""
    for name, values in _SERVED.items():
        value = vars(config).get(name)
        if value is not None and value not in values:
            raise refusal(name, value)


def check_keywords(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for model inputs that the engine would drop, for a cache that holds tokens, and where prompts
    hold more than text without its inputs (`media.py`)."""
    beyond_text = list(model_kwargs.get("mm_encoder_outputs") or ())  # generate passes an empty dict for text
    filled, unknown = [], []
    for name, value in model_kwargs.items():
        if value is None or name in _KNOWN_KEYWORDS:
            continue
        if isinstance(value, Cache):
            if _is_filled(value):
                filled.append(name)
        elif name not in TOKEN_TYPES or not has_token_types(model):
            unknown.append(name)
        elif value.any():
            beyond_text.append(name)
    if beyond_text:
        raise ValueError(
            f"the prompts hold more than text ({', '.join(beyond_text)}), and pixel_values, from which "
            "assistant_strategy reads it, are not given. Pass them, or generate without assistant_strategy."
        )
    if unknown:
        raise ValueError(
            f"the model inputs {sorted(unknown)} cannot be combined with assistant_strategy, which takes input_ids, "
            "attention_mask and pixel_values. Generate without assistant_strategy."
        )
    if filled:
        raise ValueError(
            f"{filled[0]} already holds tokens; assistant_strategy keeps its own cache. Pass the whole prompt."
        )


def _is_filled(cache: Cache) -> bool:
    for layer in cache.layers:  # those without K/V hold states
        holds = isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0
        if holds or any(getattr(layer, "has_previous_state", {}).values()):
            return True
    return False


def check_input_ids(input_ids: object, device: torch.device) -> None:
    """Raises ValueError for anything but prompts `[B, width]` int64 or int32 on `device`, the model's."""
    way_out = "pass a tensor [B, width] of token ids, as a tokenizer gives with return_tensors='pt'"
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids is a {type(input_ids).__name__}; {way_out}.")
    if input_ids.dtype not in (torch.int64, torch.int32) or input_ids.dim() != 2:
        raise ValueError(f"input_ids is {input_ids.dtype} of shape {list(input_ids.shape)}; {way_out}.")
    if input_ids.device != device and device.type != "meta":  # weights elsewhere are refused by `check_model`
        raise ValueError(f"input_ids is on {input_ids.device} and the model on {device}; move it there with .to().")
    _check_not_empty(input_ids)


def _check_not_empty(input_ids: Tensor) -> None:
    if input_ids.numel() == 0:
        shape = list(input_ids.shape)
        raise ValueError(f"input_ids is empty ({shape}); give a prompt of at least one token, e.g. the BOS token.")


def read_prompts(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> list[Tensor]:
    """B prompts `[prompt length]` int64 without their left padding, on the host.

    Args:
        input_ids: `[B, width]` int64.
        attention_mask: `[B, width]` of 0 and 1, or None for no padding.
        position_ids: `[B, width]` int64, or with axes before them, or None.

    Raises:
        ValueError: a prompt is empty, right-padded or has holes, has ids outside of the model's embedding, or its
            positions do not count from its first token.
    """
    _check_not_empty(input_ids)
    input_ids = input_ids.cpu()  # one copy of all: a device would be waited for in each of the checks
    attention_mask = None if attention_mask is None else attention_mask.cpu()
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(input_ids.shape)}; they must be equal."
        )
    prompts = list(input_ids)
    if attention_mask is not None:
        mask = mask.bool()
        lengths, width = mask.sum(1), mask.shape[1]  # [B]
        for row in (lengths == 0).nonzero().flatten().tolist():
            raise ValueError(
                f"prompt {row} is empty: its attention_mask has no 1. Every prompt needs at least one token."
            )
        left_padded = torch.arange(width, device=mask.device) >= width - lengths[:, None]  # [B, width]
        for row in (mask != left_padded).any(1).nonzero().flatten().tolist():
            raise ValueError(
                f"prompt {row} is not left-padded: its attention_mask is not 0...01...1. "
                "Tokenize with padding_side='left'."
            )
        prompts = [ids[width - length :] for ids, length in zip(input_ids, lengths.tolist(), strict=True)]
    rows = max(model.config.get_text_config(decoder=True).vocab_size, len(model.get_input_embeddings().weight))
    lowest, highest = torch.stack(torch.cat(prompts).aminmax()).tolist()
    if lowest < 0 or highest >= rows:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"input_ids holds the token {wrong}, and the model's vocabulary is 0 to {rows - 1}. Use the model's own "
            "tokenizer, or mark padding by 0 in attention_mask."
        )
    if position_ids is not None:
        position_ids = position_ids.cpu()
        counted = mask.cumsum(-1) - 1  # [B, width]; at padding anything will do
        fits = position_ids.shape[-2:] in (input_ids.shape, (1, input_ids.shape[1]))
        if not fits or bool(((position_ids != counted) & mask.bool()).any()):
            raise ValueError(
                f"position_ids of shape {list(position_ids.shape)} do not count 0, 1, 2, ... from each prompt's first "
                "token, as assistant_strategy does. Leave them unset, or generate without assistant_strategy."
            )
    return prompts


def check_lengths(
    model: PreTrainedModel,
    limit: int | None,
    lengths: Sequence[int],
    new_tokens: int,
    name: Callable[[int], str] = "prompt {}".format,
) -> None:
    """Raises ValueError where a prompt of `lengths` tokens and `new_tokens` reach beyond `limit`, the
    :func:`position_limit` of `model`; warns beyond the model's context. `name` names a row in the error."""
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)  # a network without attention has none
    longest = max(lengths)
    total = longest + new_tokens
    if limit is not None and total > limit:
        reason = "its learned positions end"
        if limit == MaskPlan.for_network(model).unmasked_window:
            reason = "generate would forget tokens that the model's own masks still show (sliding_window)"
        elif scaling := sorted({scope["rope_type"] for scope in _rope_scopes(config)} & {"dynamic", "longrope"}):
            reason = f"{scaling} RoPE scaling makes a row depend on its batch"
        raise ValueError(
            f"{name(lengths.index(longest))} has {longest} tokens; with {new_tokens} new ones it would reach {total}, "
            f"and at {limit} {reason}. Keep the longest prompt plus max_new_tokens within {limit}."
        )
    if context is not None and total > context:  # without numbers, so that a training warns once
        warnings.warn(
            f"a prompt, or its new tokens, may reach beyond the model's context of {context} "
            "(max_position_embeddings); rows that get there extrapolate, as in generate.",
            stacklevel=2,
        )


def position_limit(model: PreTrainedModel) -> int | None:
    """Number of positions of `model`; None: unlimited.

    A table of learned positions ends with the context. Under dynamic and LongRoPE scaling the frequencies of all rows
    change once the longest row, drafts included, passes a length.
    """
    config = model.config.get_text_config(decoder=True)
    if not MaskPlan.from_config(config).layer_types:
        return None  # no layer attends
    context = config.max_position_embeddings
    scopes = _rope_scopes(config)
    if not scopes:  # beside states some attention has no positions at all
        return None if Family(config).keeps_states else context
    words = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not words:
            if module.num_embeddings in (context, context + 2):  # OPT and similar families have two extra rows
                return context
    window = MaskPlan.for_network(model).unmasked_window
    limits = [] if window is None else [window]
    for scope in scopes:
        if scope["rope_type"] == "longrope":
            limits.append(scope["original_max_position_embeddings"])
        elif scope["rope_type"] == "dynamic":
            limits.append(context)
    return min(limits, default=None)


def _rope_scopes(config: Any) -> list[dict[str, Any]]:
    """RoPE parameters, one dict or one by layer type."""
    parameters, scopes = vars(config).get("rope_parameters") or {}, []
    for scope in (parameters, *parameters.values()):
        if isinstance(scope, dict) and "rope_type" in scope:
            scopes.append(scope)
    return scopes
