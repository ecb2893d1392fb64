"""Drafter classes by `assistant_strategy`, and which strategies read an option."""

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


_READ_BY = {
    "ngram_size": "ngram", "history_max_tokens": "history", "tts": "tts", "drafters": "best_of_n",
    "assistants": "best_of_n", "budget": "best_of_n", "race": "best_of_n",
}  # fmt: skip
"""Strategy or drafter by an option's name or group. Options of all drafters, and of the quantized copy, which most
strategies use, are left out: strategies are compared under one config."""


def check_use(strategy: str, config: Any) -> None:
    """Raises ValueError if `config`, a SpeculativeConfig, sets an option that `strategy` does not read. `"none"` may
    have any, for comparisons."""
    reading = {"auto": {"history"}, "best_of_n": {"best_of_n", *config.specactor.drafters}}.get(strategy, {strategy})
    for name, group in vars(config).items() if strategy != "none" else ():
        default = getattr(type(config), name)
        if group is default:
            continue
        nested = hasattr(group, "group")
        for inner, value in vars(group).items() if nested else ((name, group),):
            reader = _READ_BY.get(inner, _READ_BY.get(name))
            if reader not in {None, *reading} and value != (vars(default)[inner] if nested else default):
                raise ValueError(
                    f"{name + '.' + inner if nested else name}={value!r} has no use with assistant_strategy="
                    f"{strategy!r}, which does not draft by {reader!r}. Drop it, or set assistant_strategy={reader!r}."
                )
