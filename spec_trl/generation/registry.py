"""Drafter classes by `assistant_strategy`."""

from collections import UserDict
from typing import Any, TypeVar

from ..papers import load


CHOOSING = ("auto", "best_of_n")
"""Strategies with several drafters."""


class _Drafters(UserDict[str, Any]):
    """Classes by strategy. A room of a paper is loaded when its class is first asked for."""

    def __getitem__(self, strategy: str) -> Any:
        if isinstance(self.data[strategy], str):
            load(self.data[strategy])  # registers the class
        return self.data[strategy]


DRAFTERS = _Drafters()
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
    name, taken = drafter.strategy, DRAFTERS.data.get(drafter.strategy, kind)
    if isinstance(taken, str):
        is_other = kind.__module__ != f"spec_trl.{taken}"
    else:
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
    return tuple(name for name in DRAFTERS if assistant_of(name) == "required")


def assistant_of(strategy: str) -> str:
    """Whether a strategy drafts with an `assistant_model`: "none", "optional" or "required"."""
    if strategy in CHOOSING:
        return "optional"
    return DRAFTERS[strategy].assistant if strategy in DRAFTERS else "none"
