"""Adds the keyword `assistant_strategy` to `generate`, by transformers' `custom_generate` hook. Installing the keyword
is the only change to transformers."""

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList, StopStringCriteria

from .engine.network.media import INPUTS, take_inputs
from .engine.requirements import check_input_ids, check_not_diverted, refusal
from .generate import speculative_decoding
from .options import SpeculativeConfig
from .refusals import check


_SIGNATURE = inspect.signature(speculative_decoding)
_generate: Callable[..., Any] | None = None
DEFAULTS: "WeakKeyDictionary[Any, Callable[..., Any]]" = WeakKeyDictionary()
"""Per model: a call of `model.generate` without `assistant_strategy`; gets plain `generate` and the arguments."""
UNDONE_WITH_IT = list[Callable[[], None]]()
"""Calls that undo other changes of transformers when the keyword is removed."""


def install() -> None:
    """Adds the keyword `assistant_strategy` to `GenerationMixin.generate`; importing spec_trl calls this."""
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
        if is_other:
            check({"assistant_strategy": assistant_strategy is not None, "custom_generate": True})
        else:  # arguments precede configs
            assistant_strategy = setting("assistant_strategy", assistant_strategy, self, args, kwargs)
        is_argument = speculative_config is not None
        speculative_config = setting("speculative_config", speculative_config, self, args, kwargs)
        if assistant_strategy is None and custom is not speculative_decoding:
            check({"speculative_config": is_argument and not is_other, "no assistant_strategy": True})
            if custom is None and (default := DEFAULTS.get(self)) is not None:
                return default(original, self, args, kwargs)
            return original(self, *args, **kwargs)
        if len(args) > 1:  # more than the prompts
            args, kwargs = (), dict(zip(list(inspect.signature(original).parameters)[1:], args, strict=False)) | kwargs
        _prepare_call(self, args, kwargs)
        # `generate` would encode media with the modules of the policy, which may train.
        media = {} if INPUTS.isdisjoint(kwargs) else take_inputs(kwargs)
        kwargs["custom_generate"] = custom = functools.partial(
            speculative_decoding,
            assistant_strategy="self" if assistant_strategy is None else assistant_strategy,
            speculative_config=SpeculativeConfig.coerce(speculative_config),
            # generate() gives a custom method no assistant and no streamer, and refuses an assistant together with
            # num_return_sequences. Private keywords pass them on.
            _assistant=kwargs.pop("assistant_model", None),
            _streamer=kwargs.get("streamer"),
            _media=media,
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
    """Refuses or overrides arguments on which `generate` would act or fail before the decoding method runs. Turns stop
    strings into a criterion, because a custom method gets no tokenizer. `args` has at most the prompts."""
    config = override(model, kwargs.pop("generation_config", None), kwargs)
    if config is not None:
        kwargs["generation_config"] = config
    prompts = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
    if prompts is not None:
        check_input_ids(prompts, model.device)
    check_not_diverted(setting("token_healing", None, model, args, kwargs), kwargs)
    check({"synced_gpus=True": bool(kwargs.get("synced_gpus")), "assistant_strategy": True})
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


# ---- settings that change no token: one rule for `generate`, `speculate` and the trainers ---------------------------

Config = TypeVar("Config", GenerationConfig, GenerationConfig | None)
_OWN_CACHE = "the engine has a K/V cache of its own"
_DRAFT_LENGTH = "speculative_config={'draft_length': ...} says how many tokens are drafted"
_TOGGLE = "speculative_config={'sd_toggle': 'measured'} drafts where it pays"
_TOKENIZERS = "it is for an assistant of another tokenizer, which is not served"
NEUTRAL = {
    "use_cache": _OWN_CACHE,
    "cache_implementation": _OWN_CACHE,
    "cache_config": _OWN_CACHE,
    "max_cache_len": _OWN_CACHE,
    "prefill_chunk_size": "the engine reads prompts in pieces of at most 8192 tokens",
    "compile_config": "speculative_config={'runner': ...} says how forwards run",
    "num_assistant_tokens": _DRAFT_LENGTH,
    "num_assistant_tokens_schedule": _TOGGLE,
    "assistant_confidence_threshold": _TOGGLE,
    "max_matching_ngram_size": "speculative_config={'ngram_size': ...} says how long a suffix is looked up",
    "assistant_lookbehind": _TOKENIZERS,
    "target_lookbehind": _TOKENIZERS,
    "speculation_type": "assistant_strategy names the kind of drafter",
}
"""What holds instead, by setting. Without `disable_compile`, which TRL's trainers always set, `low_memory`, which
`generate` does not read in sampling and greedy search, and `is_assistant`, which ends it with an error."""
_DEFAULTS = {name: [None, GenerationConfig._get_default_generation_params().get(name)] for name in NEUTRAL}
_DEFAULTS["cache_implementation"] += ["dynamic", "dynamic_full", "hybrid"]  # `generate` unsets the last one
_said: set[str] = set()


def override(model: Any, config: Config, keywords: dict[str, Any], of_config: str = "generation_config") -> Config:
    """Overrides the settings of a call of `generate`.

    Args:
        model: its own generation config is the last place that a setting may come from.
        config: of the call, if there is one.
        keywords: of the call; loses the settings.
        of_config: names `config` to the user.

    Returns:
        `config`, or a copy with which `generate` makes no cache of another kind.

    Raises:
        ValueError: the cache is quantized, on which tokens depend.
    """
    own = getattr(model, "generation_config", None)
    fresh: Any = config
    for name, instead in NEUTRAL.items():
        value, place = keywords.get(name), "this call"
        if value is None:
            value, place = getattr(config, name, None), of_config
        if value is None:
            value, place = getattr(own, name, None), "model.generation_config"
            if getattr(own, "_from_model_config", False) and value == getattr(model.config, name, None):
                place = "model.config"
        if value in _DEFAULTS[name]:
            continue
        if (name, value) == ("cache_implementation", "quantized"):
            raise refusal(name, value)
        if (said := f"{name}={value!r}") not in _said:
            _said.add(said)
            warnings.warn(f"{said} ({place}) is overridden, which changes no token: {instead}.", stacklevel=4)
        keywords.pop(name, None)
        if name == "cache_implementation" and config is None:
            keywords[name] = None  # comes before model.generation_config
        elif name == "cache_implementation":
            fresh = copy.copy(config)
            fresh.cache_implementation = "dynamic"
    return cast(Config, fresh)
