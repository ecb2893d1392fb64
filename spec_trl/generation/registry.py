"""Registers drafter classes by `assistant_strategy`."""

from typing import Any, TypeVar


CHOOSING = ("auto", "best_of_n")
"""Strategies with several drafters."""
DRAFTERS: dict[str, Any] = {}
"""Drafter classes by strategy, those of users included (:func:`register_drafter`)."""
T = TypeVar("T", bound=type)


def register_drafter(kind: T) -> T:
    """Class decorator: `generate(assistant_strategy=kind.strategy)` and the trainer draft with `kind`, a
    :class:`~.Drafter`, which replaces a class of the same module and name (a notebook's cell that runs again).

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
    return ("none", *DRAFTERS, *CHOOSING)


def needing_assistant() -> tuple[str, ...]:
    return tuple(name for name, kind in DRAFTERS.items() if kind.assistant == "required")


def taking_assistant() -> tuple[str, ...]:
    return (*(name for name, kind in DRAFTERS.items() if kind.assistant != "none"), *CHOOSING)


def drafting_ahead() -> tuple[str, ...]:
    return tuple(name for name, kind in DRAFTERS.items() if kind.drafts_ahead)
