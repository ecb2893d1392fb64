"""Adds the keyword `assistant_strategy` to `generate`, by transformers' `custom_generate` hook. Installing the keyword
is the only change to transformers."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationMixin, StoppingCriteriaList, StopStringCriteria

from .engine.network.image_prompts import IMAGES, take_inputs
from .engine.requirements import check_input_ids, check_not_diverted
from .engine.sampling.neutral_settings import override
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
        # `generate` would encode images with the modules of the policy, perhaps in training mode.
        image_inputs = {} if IMAGES.isdisjoint(kwargs) else take_inputs(kwargs)
        kwargs["custom_generate"] = custom = functools.partial(
            speculative_decoding,
            assistant_strategy="self" if assistant_strategy is None else assistant_strategy,
            speculative_config=SpeculativeConfig.coerce(speculative_config),
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
