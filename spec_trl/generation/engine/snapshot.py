"""Whether a network is as it was at the last call. To read all of its modules anew takes as long as a forward."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig

from .. import kept


T = TypeVar("T")
_NAME = "snapshot"
_TENSORS = "_parameters", "_buffers"  # a shadow has the same dicts; copies would keep alive what leaves them
_CODE = {FunctionType, MethodType, partial}


class Snapshot:
    """What the modules of `network` hold: their classes and attributes, what lies in attributes that are containers,
    their configs, and kind, dtype and device of their tensors, but not which tensors these are.

    Attributes:
        known: what was found out about the network, by name; true while the snapshot holds.
        is_complete: False for a network with hooks, methods or closures as attributes. They may hold the network, and
            what they do may change unseen: its snapshot holds nothing, and is not kept.
    """

    def __init__(self, network: nn.Module) -> None:
        self.known: dict[str, Any] = {}
        modules = list(network.modules())
        values = [value for module in modules for value in vars(module).values()]
        hooks = [name for name in vars(network) if "_hooks" in name]
        is_hooked = any(vars(module)[name] for module in modules for name in hooks)
        self.is_complete = not (is_hooked or any(type(value) in _CODE and _holds_more(value) for value in values))
        if not self.is_complete:
            return
        self._below = modules[1:]
        self._kinds = [type(module) for module in modules]
        self._states = [
            {name: value if name in _TENSORS else _copied(value) for name, value in vars(module).items()}
            for module in modules
        ]
        self._owners = [state[name] for state in self._states for name in _TENSORS]
        self._kinds_of_tensors = self._read_tensors()
        configs = {id(value): value for value in values if isinstance(value, PreTrainedConfig)}
        self._configs = [(config, copy.deepcopy(vars(config))) for config in configs.values()]

    def holds(self, network: nn.Module) -> bool:
        """Whether nothing of it has changed."""
        modules = [network, *self._below]
        try:
            return (
                list(map(type, modules)) == self._kinds
                and list(map(vars, modules)) == self._states  # to see that values are the same objects takes little
                and self._read_tensors() == self._kinds_of_tensors
                and all(vars(config) == then for config, then in self._configs)
            )
        except (RuntimeError, ValueError):  # another tensor or array stands where one stood: they have no one truth
            return False

    def _read_tensors(self) -> list[Any]:
        tensors = chain.from_iterable(map(dict.values, filter(None, self._owners)))
        return [tensor if tensor is None else (type(tensor), tensor.dtype, tensor.device) for tensor in tensors]


def snapshot_of(network: nn.Module) -> Snapshot:
    """The snapshot that is kept for `network`, where it holds; else a new one."""
    found: Snapshot | None = kept.look(network, _NAME)
    if found is None or not found.holds(network):
        found = Snapshot(network)
        if found.is_complete:
            kept.keep(network, _NAME, found)
    return found


def is_unchanged(network: nn.Module) -> bool:
    """Whether a snapshot of `network` is kept, and holds."""
    found: Snapshot | None = kept.look(network, _NAME)
    return found is not None and found.holds(network)


def while_unchanged(network: nn.Module, name: str, find: Callable[[], T]) -> T:
    """What `find` returns, which is called again only when `network` has changed; `name` tells it from others."""
    known = snapshot_of(network).known
    if name not in known:
        known[name] = find()
    found: T = known[name]
    return found


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else value


def _holds_more(code: Any) -> bool:
    """Whether a callable holds values of its own, and is not just a function of a module."""
    return not isinstance(code, FunctionType) or bool(code.__closure__)
