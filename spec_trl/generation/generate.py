"""The keyword: teaches `generate` the argument `assistant_strategy`, through transformers' `custom_generate` hook."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationMixin, StoppingCriteriaList, StopStringCriteria

from .configuration import SpeculativeConfig, check_strategy
from .decoding import speculative_decoding
from .engine.requirements import check_input_ids, check_not_diverted
from .option_use import check_use


_SIGNATURE = inspect.signature(speculative_decoding)
_generate: Callable[..., Any] | None = None
DEFAULTS: "WeakKeyDictionary[Any, Callable[..., Any]]" = WeakKeyDictionary()
"""What generates, by model, where a call names no method: called with plain `generate` and the call's arguments."""


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
        if custom is None and assistant_strategy is None and (default := DEFAULTS.get(self)) is not None:
            return default(original, self, args, kwargs)
        if not is_other:  # it comes before what a config says, like all arguments
            assistant_strategy = _given("assistant_strategy", assistant_strategy, self, args, kwargs)
        is_argument = speculative_config is not None
        speculative_config = _given("speculative_config", speculative_config, self, args, kwargs)
        if assistant_strategy is None and custom is not speculative_decoding:
            if is_argument and not is_other:
                raise ValueError("speculative_config is given without assistant_strategy; name a strategy.")
            return original(self, *args, **kwargs)
        strategy = check_strategy("self" if assistant_strategy is None else assistant_strategy)
        config = SpeculativeConfig.coerce(speculative_config)
        if kwargs.get("drafter") is None:  # else it was made with other options
            check_use(strategy, config)
        _check_before_generate(self, args, kwargs)
        kwargs["custom_generate"] = custom = functools.partial(
            speculative_decoding,
            assistant_strategy=strategy,
            speculative_config=config,
            # generate() gives a custom method no assistant and no streamer, and refuses an assistant together with
            # num_return_sequences. Private keywords pass them on.
            _assistant=kwargs.pop("assistant_model", None),
            _streamer=kwargs.get("streamer"),
        )
        custom.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # generate asks for it twice
        return original(self, *args, **kwargs)

    GenerationMixin.generate = generate


def uninstall() -> None:
    """Takes the keyword away again; `custom_generate=spec_trl.speculative_decoding` goes on working."""
    global _generate
    if _generate is not None:
        GenerationMixin.generate = _generate
        _generate = None


def _config_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("generation_config", args[1] if len(args) > 1 else None)


def _given(name: str, value: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument `name`: its `value`, else that of the call's generation_config, else of the model's own. That is
    the order of `generate`, whose configs carry entries they do not know."""
    configs = _config_given(args, kwargs), getattr(model, "generation_config", None)
    values = (value, *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def completed(name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The entry `name` of the config that `generate` will complete from these."""
    return kwargs[name] if name in kwargs else _given(name, None, model, args, kwargs)


def _check_before_generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what `generate` would act on, or fail at, before it calls the decoding method. Makes a criterion of stop
    strings, because `generate` does not pass the tokenizer on to a custom method."""
    prompts = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
    if prompts is not None:
        check_input_ids(prompts, model.device)
    heals, stop_strings = (completed(name, model, args, kwargs) for name in ("token_healing", "stop_strings"))
    check_not_diverted(heals, kwargs)
    if kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True cannot be combined with assistant_strategy: ranks take different numbers of rounds. "
            "Gather the weights around generate instead (TRL does so for ZeRO-3), and leave synced_gpus unset."
        )
    if stop_strings:
        move_stop_strings(stop_strings, kwargs)


def move_stop_strings(stop_strings: str | list[str], kwargs: dict[str, Any]) -> None:
    """Puts a criterion in place of `stop_strings` and the tokenizer among the keywords of a call of `generate`."""
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} needs tokenizer=..., to match strings across tokens.")
    kwargs["stop_strings"] = None
    criteria = list(kwargs.pop("stopping_criteria", None) or [])
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])
