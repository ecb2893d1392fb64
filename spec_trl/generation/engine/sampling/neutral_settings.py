"""Overrides settings of `generate` that change no token and that the engine does not read. They are overridden, and a
warning says so once."""

import copy
import warnings
from typing import Any, TypeVar, cast

from transformers import GenerationConfig

from ..requirements import refusal


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


Config = TypeVar("Config", GenerationConfig, GenerationConfig | None)


def override(model: Any, config: Config, keywords: dict[str, Any], of_config: str = "generation_config") -> Config:
    """Overrides the settings of a call of `generate`.

    Args:
        model: its own generation config is the last place that a setting may come from.
        config: of the call, if there is one.
        keywords: of the call; loses the settings.
        of_config: names `config` to the user.

    Returns:
        `config`, or a copy that makes `generate` create no cache of another kind.

    Raises:
        ValueError: the cache is quantized, and would change tokens.
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
