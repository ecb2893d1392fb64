"""Registers drafter classes by `assistant_strategy`."""

from typing import Any, TypeVar

from ..papers import load


CHOOSING = ("auto", "best_of_n")
"""Strategies with several drafters."""
_ROOMS = {"tts": "papers.test_time_speculation.distilled_drafter"}  # loaded when their class is asked for


class _Drafters(dict[str, Any]):
    def __missing__(self, strategy: str) -> Any:
        load(_ROOMS[strategy])  # registers the class
        return self[strategy]


DRAFTERS = _Drafters()
"""Drafter classes by strategy, those of users included (:func:`register_drafter`); it lists classes of papers only
after they were asked for."""
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
    is_other |= name in _ROOMS and kind.__module__ != f"spec_trl.{_ROOMS[name]}"
    if name in ("none", "custom", *CHOOSING) or is_other:
        raise ValueError(f"strategy={name!r} of {kind.__name__} is taken; give the class another strategy name.")
    DRAFTERS[name] = kind
    return kind


def drafter_names() -> tuple[str, ...]:
    """Strategies with one drafter."""
    return tuple(dict.fromkeys((*DRAFTERS, *_ROOMS)))


def strategies() -> tuple[str, ...]:
    """All values of `assistant_strategy`."""
    return ("none", *drafter_names(), *CHOOSING)


def find(strategy: str) -> Any:
    """Returns the class of a strategy's drafter; None: it has none, or several."""
    return None if strategy in ("none", *CHOOSING) else DRAFTERS[strategy]


def assistant_of(strategy: str) -> str:
    """Whether a strategy drafts with an `assistant_model`: "none", "optional" or "required"."""
    return "optional" if strategy in CHOOSING else getattr(find(strategy), "assistant", "none")


def needing_assistant() -> tuple[str, ...]:
    """Drafters that draft with an `assistant_model`."""
    return tuple(name for name in drafter_names() if assistant_of(name) == "required")
