"""All that is kept for a model between calls: one registry, one release.

What a call uses belongs to the call. It takes a thing out, and puts it back when it ends. A call that runs at the same
time on the same model, in a stopping criterion or in another thread, does not find it and makes its own; of two that
come back the last one is kept.
"""

import gc
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


_kept: "WeakKeyDictionary[nn.Module, dict[str, Any]]" = WeakKeyDictionary()


def take(model: nn.Module, name: str) -> Any | None:
    """What is kept for `model` as `name`, which is kept no more; None: nothing."""
    return _kept.get(model, {}).pop(name, None)  # at once: two threads never get the same


def look(model: nn.Module, name: str) -> Any | None:
    """The same, but it stays: for what no call changes."""
    return _kept.get(model, {}).get(name)


def keep(model: nn.Module, name: str, value: Any) -> None:
    """Keeps `value`, in place of what was kept as `name`, until `model` dies or is released."""
    _kept.setdefault(model, {})[name] = value


def release(model: nn.Module) -> None:
    """Frees all that is kept for `model`, a wrapped one included: the K/V cache and captured forwards, the quantized
    copy, a drafter of `"tts"` with what it has learned, and what `"auto"` and `"best_of_n"` know of their drafters.

    What a call has taken that still runs comes back when it ends.
    """
    found = [_kept.pop(module, None) for module in model.modules()]
    if any(found):
        found.clear()
        gc.collect()  # a runner and what it captured hold each other
