"""All that is kept for a model between calls: one registry, one release.

A call takes a thing out, has it for itself, and puts it back when it ends. A call that runs at the same time on the
same model does not find it and makes its own; of two that come back the last one is kept.
"""

import gc
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import nn


T = TypeVar("T")
RUNNER = "runner"  # with its captured forwards, which hold it: of all that is kept, it alone needs a collection
_kept: "WeakKeyDictionary[nn.Module, dict[str, Any]]" = WeakKeyDictionary()


def take(model: nn.Module, name: str) -> Any | None:
    """Removes and returns the entry `name` of `model`, or None."""
    return _kept.get(model, {}).pop(name, None)  # in one step: two threads never get the same


def look(model: nn.Module, name: str) -> Any | None:
    """Returns the entry without removing it: for entries that no call changes."""
    return _kept.get(model, {}).get(name)


def keep(model: nn.Module, name: str, value: Any) -> None:
    """Keeps `value`, in place of what was kept as `name`, until `model` dies or is released."""
    _kept.setdefault(model, {})[name] = value


def weak(model: T) -> Callable[[], T | None]:
    """Gives `model` back while it lives. What is kept for a model must hold it only so, or it would never die."""
    return ref(model)


def release(model: nn.Module) -> None:
    """Frees all that is kept for `model`, also if it is wrapped: the K/V cache and captured forwards, the quantized
    copy, a drafter of `"tts"` with what it has learned, the texts of earlier calls, and what is known of drafters and
    rounds.

    What a running call has taken comes back when that call ends.
    """
    found = [_kept.pop(module, {}) for module in model.modules()]
    captured = any(RUNNER in own for own in found)
    found.clear()
    if captured:  # a collection takes 0.3 s
        gc.collect()
