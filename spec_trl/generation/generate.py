"""The keyword: teaches `generate` the argument `assistant_strategy`, through transformers' `custom_generate` hook."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationMixin, StoppingCriteriaList, StopStringCriteria

from .configuration import SpeculativeConfig, check_strategy
from .decoding import speculative_decoding
from .engine.requirements import check_not_diverted, check_not_empty


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
        _check_before_generate(self, args, kwargs)
        kwargs["custom_generate"] = functools.partial(
            speculative_decoding,
            assistant_strategy=check_strategy(assistant_strategy or "self"),
            speculative_config=SpeculativeConfig.coerce(speculative_config),
            # generate gives a custom method no assistant and no streamer, and refuses an assistant together with
            # num_return_sequences: so they take another way.
            _assistant=kwargs.pop("assistant_model", None),
            _streamer=kwargs.get("streamer"),
        )
        _move_stop_strings(self, args, kwargs)
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


def _check_before_generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses what `generate` would act on, or fail at, before it calls the decoding method."""
    prompts = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
    if isinstance(prompts, Tensor):
        check_not_empty(prompts)
    check_not_diverted(model, _config_given(args, kwargs), kwargs)
    if kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True cannot be combined with assistant_strategy: ranks take different numbers of rounds. "
            "Gather the weights around generate instead (TRL does so for ZeRO-3), and leave synced_gpus unset."
        )


def _move_stop_strings(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes a criterion of stop strings here: `generate` keeps the tokenizer from a custom method."""
    given = _config_given(args, kwargs) or model.generation_config
    stop_strings = kwargs.pop("stop_strings", None) or given.stop_strings
    if not stop_strings:
        return
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings!r} needs tokenizer=..., to match strings across tokens.")
    kwargs["stop_strings"] = None
    criteria = list(kwargs.pop("stopping_criteria", None) or [])
    kwargs["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop_strings)])
