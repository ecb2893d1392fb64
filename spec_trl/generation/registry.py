"""Drafter classes by `assistant_strategy`, and which strategies read an option."""

from dataclasses import MISSING, fields
from typing import Any, TypeVar


CHOOSING = ("auto", "best_of_n")
"""Strategies with several drafters."""
DRAFTERS: dict[str, Any] = {}
"""Drafter classes by strategy, those of users included (:func:`register_drafter`)."""
T = TypeVar("T", bound=type)


def register_drafter(kind: T) -> T:
    """Class decorator: `generate(assistant_strategy=kind.strategy)`, and the trainer, draft with `kind`, a
    :class:`~.Drafter`.

    A class of the same module and name replaces the older one, as when a notebook's cell runs again.

    Raises:
        ValueError: another class has the name.
    """
    drafter: Any = kind
    name, taken = drafter.strategy, DRAFTERS.get(drafter.strategy, kind)
    is_other = (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__)
    if name in ("none", "custom", *CHOOSING) or is_other:
        raise ValueError(f"strategy={name!r} of {kind.__name__} is taken; give the class another strategy name.")
    DRAFTERS[name] = kind
    return kind


def strategies() -> tuple[str, ...]:
    """All values of `assistant_strategy`."""
    return ("none", *DRAFTERS, *CHOOSING)


def needing_assistant() -> tuple[str, ...]:
    """Drafters that draft with an `assistant_model`."""
    return tuple(name for name, kind in DRAFTERS.items() if kind.assistant == "required")


def taking_assistant() -> tuple[str, ...]:
    """Strategies that accept an `assistant_model`."""
    return (*(name for name, kind in DRAFTERS.items() if kind.assistant != "none"), *CHOOSING)


def drafting_ahead() -> tuple[str, ...]:
    """Drafters that can run decoupled."""
    return tuple(name for name, kind in DRAFTERS.items() if kind.drafts_ahead)


_READ_BY = {"tts_": "tts", "best_of_n_": "best_of_n", "ngram_size": "ngram", "history_max_tokens": "history"}
"""Strategy or drafter by prefix of an option's name. Options of all drafters, and of the quantized copy, which most
strategies use, are left out: strategies are compared under one config."""


def check_use(strategy: str, config: Any) -> None:
    """Raises ValueError if `config`, a SpeculativeConfig or a dataclass with options of the same names, sets an option
    that `strategy` does not read to a value other than its default. `"none"` may have any, for comparisons."""
    reading = {"auto": {"history"}, "best_of_n": {"best_of_n", *config.best_of_n_drafters}}.get(strategy, {strategy})
    for each in fields(config) if strategy != "none" else ():
        for begin, reader in _READ_BY.items():
            if not each.name.startswith(begin) or reader in reading:
                continue
            default = each.default if each.default_factory is MISSING else each.default_factory()
            value = getattr(config, each.name)
            if value != default and not (isinstance(value, list) and tuple(value) == default):  # JSON has no tuples
                raise ValueError(
                    f"{each.name}={value!r} has no use with assistant_strategy={strategy!r}, which does not draft by "
                    f"{reader!r}. Drop it, or set assistant_strategy={reader!r}."
                )
