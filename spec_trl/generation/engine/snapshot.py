"""Whether a network is as it was at the last call. To read all of its modules anew takes as long as a forward."""

import copy
import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig

from .. import kept
from .training_marks import HOOK_DICTS, held, lasting_attributes


T = TypeVar("T")
_NAME = "snapshot"
_TENSORS = "_parameters", "_buffers"  # a shadow has the same dicts; copies would keep alive what leaves them
_CODE = {FunctionType, MethodType, partial}
_ONE_VALUE = (bool, int, float, str, type(None))
# Objects that attributes may lead to, beside what lies in them: to look at these takes a few milliseconds.
_MOST_OBJECTS = 10_000


class Snapshot:
    """What the modules of `network` hold: their classes and forwards, attributes, what lies in attributes that are
    containers, configs, and kind, dtype and device of tensors, but not which tensors these are; and without what
    training leaves on them (:mod:`training_marks`).

    Attributes:
        known: what was found out about the network, by name; true while the snapshot holds.
        is_complete: False for a network with hooks, methods or closures as attributes, since what they do may change
            unseen, and for one whose attributes lead to itself: what is kept would hold it for ever. Such a snapshot
            holds nothing, and is not kept.
    """

    def __init__(self, network: nn.Module) -> None:
        self.known: dict[str, Any] = {}
        modules = list(network.modules())
        states = [_state_of(module) for module in modules]
        values = [value for state in states for value in state.values()]
        is_hooked = any(state.get(name) for state in states for name in HOOK_DICTS)
        self.is_complete = not (is_hooked or any(map(_may_change, values)) or _lead_to(network, values, modules[1:]))
        if not self.is_complete:
            return
        self._below = modules[1:]
        self._kinds = list(map(_kind_of, modules))
        self._states = states
        self._owners = [state[name] for state in states for name in _TENSORS]
        self._kinds_of_tensors = self._read_tensors()
        configs = {id(value): value for value in values if isinstance(value, PreTrainedConfig)}
        self._configs = [(config, copy.deepcopy(vars(config))) for config in configs.values()]

    def holds(self, network: nn.Module) -> bool:
        """Whether nothing of it has changed."""
        modules = [network, *self._below]
        try:
            return (
                list(map(_kind_of, modules)) == self._kinds
                # To see that values are the same objects takes little; few modules have marks of training.
                and all(
                    vars(module) == then or _state_of(module) == then
                    for module, then in zip(modules, self._states, strict=True)
                )
                and self._read_tensors() == self._kinds_of_tensors
                and all(vars(config) == then for config, then in self._configs)
            )
        except (RuntimeError, ValueError):  # another tensor or array stands where one stood: they have no one truth
            return False

    def _read_tensors(self) -> list[Any]:
        tensors = chain.from_iterable(map(dict.values, filter(None, self._owners)))
        return [tensor if tensor is None else (type(tensor), tensor.dtype, tensor.device) for tensor in tensors]


def _found(network: nn.Module) -> Snapshot | None:
    """The snapshot that is kept for `network`, where it holds."""
    found: Snapshot | None = kept.look(network, _NAME)
    return found if found is not None and found.holds(network) else None


def snapshot_of(network: nn.Module) -> Snapshot:
    """The snapshot that is kept for `network`, where it holds; else a new one."""
    found = _found(network)
    if found is None:
        found = Snapshot(network)
        if found.is_complete:
            kept.keep(network, _NAME, found)
    return found


def is_unchanged(network: nn.Module) -> bool:
    """Whether a snapshot of `network` is kept, and holds."""
    return _found(network) is not None


def while_unchanged(network: nn.Module, name: str, find: Callable[[], T]) -> T:
    """What `find` returns, which is called again only when `network` has changed; `name` tells it from others."""
    known = snapshot_of(network).known
    if name not in known:
        known[name] = find()
    found: T = known[name]
    return found


def _kind_of(module: nn.Module) -> tuple[type, Any]:
    """The class of `module`, and its forward, which may be replaced."""
    kind: Any = type(module)
    return kind, kind.forward


def _state_of(module: nn.Module) -> dict[str, Any]:
    """What `module` holds, without marks of training; its containers are copied."""
    attributes = lasting_attributes(module)
    return {name: value if name in _TENSORS else _copied(value) for name, value in attributes.items()}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else value


def _may_change(value: Any) -> bool:
    """Whether `value` is code that holds values of its own, and is not just a function of a module."""
    if type(value) not in _CODE:
        return False
    if not isinstance(value, FunctionType):
        return True
    return bool(value.__closure__) or not all(isinstance(default, _ONE_VALUE) for default in held(value))


def _lead_to(network: nn.Module, values: Sequence[Any], below: Sequence[nn.Module]) -> bool:
    """Whether something in `values`, which the modules `below` the network have too, holds `network`, or leads to so
    much that this is not known."""
    seen: dict[int, Any] = {id(module): module for module in below}  # objects, so that no id is given out twice
    left, most = list(values), len(values) + len(below) + _MOST_OBJECTS
    while left and len(seen) <= most:
        value = left.pop()
        if value is network:
            return True
        if id(value) in seen or not gc.is_tracked(value) or isinstance(value, type | ModuleType):
            continue
        seen[id(value)] = value
        left += [*held(value), vars(value)] if isinstance(value, FunctionType) else gc.get_referents(value)
    return bool(left)
