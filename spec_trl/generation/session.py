"""Stores objects that the next call for a model reuses: one session per model.

A call borrows the session of its model, and compares the fingerprint of the model (modules, hooks, plain attributes
such as active adapters and their scaling, dtypes and devices) with that of the last call: objects of another structure
are dropped. The values of the weights may change: copies of weights compare :class:`WeightState`, and captured
forwards, which read weights by address, compare :func:`addresses`.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from threading import Lock
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from .engine.network.training_marks import HOOK_DICTS, held, lasting_attributes


if TYPE_CHECKING:
    from ..papers.specactor.ladder import Ladder
    from .engine.cuda.graph_runner import GraphRunner
    from .engine.drafter import Drafter
    from .strategies import CachedControl


T = TypeVar("T")
_TENSORS = "_parameters", "_buffers"  # a shadow has the same dicts; copies would keep removed entries alive
_CODE = {FunctionType, MethodType, partial}
_PLAIN = (bool, int, float, str)
_OF_TRAINING = ("training", "gradient_checkpointing")  # ignored by a shadow, always in eval mode
# Objects reached from attributes that are searched for the model: a few milliseconds.
_MOST_OBJECTS = 10_000
_VALUES = 256  # compared values of a weight; an optimizer step changes most values
_sessions: "WeakKeyDictionary[nn.Module, Session]" = WeakKeyDictionary()
_snapshots: "WeakKeyDictionary[nn.Module, Snapshot]" = WeakKeyDictionary()


# ---- sessions -----------------------------------------------------------------------------------------------------


class Shadow(NamedTuple):
    """The network that ran the last call, with its first snapshot."""

    network: PreTrainedModel
    exact: bool
    snapshot: "Snapshot"


class Session:
    """Objects that calls for one model share, one call at a time. They must not reference the model, or it would never
    be freed.

    Attributes:
        snapshot: of the model, taken or compared at the beginning of the call; None before the first call.
        shadow: the network of the last call, valid while the snapshot holds.
        runner: with captured forwards, valid while the structure of the model is the same.
        drafters: by strategy, valid while the structure is the same, or longer (`Drafter.outlives_changes`).
        controls: by drafters and options, with their measurements.
        ladder: of the drafters profiled last.
        acceptance: first-token acceptance by strategy.
        heads: whether a checkpoint, by its name, has an MTP head that can draft for the model.
    """

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.shadow: Shadow | None = None
        self.runner: GraphRunner | None = None
        self.drafters: dict[str, Drafter] = {}
        self.controls: dict[str, CachedControl] = {}
        self.ladder: Ladder | None = None
        self.acceptance: dict[str, float] = {}
        self.heads: dict[str, bool] = {}
        self._structure: tuple[object, ...] | None = None  # of the model, when drafters and runner were made
        self._in_use = Lock()
        self._second: Session | None = None  # for a call that begins while this one is lent

    @classmethod
    def of(cls, model: nn.Module) -> "Session":
        return _sessions.setdefault(model, cls())

    @classmethod
    def below(cls, model: nn.Module) -> "list[Session]":
        """Returns the sessions of `model` and of the models that it wraps, with their second sessions."""
        sessions = [_sessions[module] for module in model.modules() if module in _sessions]
        for session in sessions:
            if session._second is not None:
                sessions.append(session._second)
        return sessions

    @classmethod
    @contextmanager
    def lend(cls, model: nn.Module) -> "Iterator[Session]":
        """Lends the session of `model` to one call. A call that begins while another runs gets a second session, which
        serves later such calls too, but stores no captured forwards. A session released during a call is freed after
        the call."""
        first = session = cls.of(model)
        while not session._in_use.acquire(blocking=False):
            if session._second is None:
                session._second = cls()
            session = session._second
        try:
            session._follow(model)
            yield session
        finally:
            try:
                if session is not first:
                    session.shadow = None
                    session.drop_runner()
                if session._structure is None and session._depends:
                    session._structure = structure(model)
            finally:
                if _sessions.get(model) is not first:
                    session.clear()
                session._in_use.release()

    def _follow(self, model: nn.Module) -> None:
        snapshot = snapshot_of(model)
        if snapshot is self.snapshot:
            return
        self.snapshot, self.shadow = snapshot, None
        present = snapshot.find("structure", partial(_structure, model)) if self._depends else None
        if present != self._structure:
            self.drafters = {name: drafter for name, drafter in self.drafters.items() if drafter.outlives_changes}
            self.drop_runner()
        self._structure = present

    @property
    def _depends(self) -> bool:
        return self.runner is not None or any(not drafter.outlives_changes for drafter in self.drafters.values())

    def check_shadow(self) -> None:
        if self.shadow is not None:
            snapshot = self.shadow.snapshot
            if not (snapshot.is_complete and snapshot.holds(self.shadow.network)):
                self.shadow = None

    def drop_runner(self) -> None:
        """Frees captured forwards. They reference each other: this needs a garbage collection (0.3 s)."""
        if self.runner is not None:
            self.runner = None
            gc.collect()

    def clear(self) -> None:
        """Frees all objects, and those of the second session unless a call uses it."""
        second, self._second = self._second, None
        if second is not None and second._in_use.acquire(blocking=False):
            second.clear()
        self.snapshot = self.shadow = self.ladder = self._structure = None
        self.drafters, self.controls, self.acceptance, self.heads = {}, {}, {}, {}
        self.drop_runner()


def capturing_session(model: nn.Module) -> Session | None:
    """Returns the session of `model` (perhaps wrapped) that holds a runner with captured forwards, or None."""
    return next((session for session in Session.below(model) if session.runner is not None), None)


def release(model: nn.Module) -> None:
    """Frees all objects that calls for `model` (perhaps wrapped) have left: K/V cache and captured forwards, the
    quantized copy, assistants loaded by path or hub id, a `"tts"` drafter with its learned weights, texts of earlier
    calls, and measurements of drafters and rounds. Objects of a running call are freed at its end.
    """
    for module in model.modules():
        _snapshots.pop(module, None)
        session = _sessions.pop(module, None)
        if session is not None and session._in_use.acquire(blocking=False):
            session.clear()


# ---- fingerprints -------------------------------------------------------------------------------------------------


def structure(model: nn.Module) -> tuple[object, ...]:
    """Structure of `model` without its weights: modules, their hooks and plain attributes (such as active, merged or
    scaled adapters), and the dtypes and devices of tensors. While the structure is equal, a copy of `model` needs at
    most new weights."""
    return snapshot_of(model).find("structure", partial(_structure, model))


def addresses(network: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers()))


class WeightState:
    """Addresses of the parameters of `network`, their version counters, and some of their values, because fused
    optimizers and writes through `.data` count no version; a write of only other values stays unseen. Takes 3 ms with
    272 parameters on a CPU."""

    def __init__(self, network: nn.Module) -> None:
        parameters = list(chain.from_iterable(map(_stored, network.parameters())))
        # Tensors made in inference mode have no counter.
        self._counters = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in parameters]
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            points = round(_VALUES ** (1 / max(1, parameter.dim())))  # in a dimension: at most twice as many
            grid = tuple(slice(None, None, max(1, size // points)) for size in parameter.shape)
            values = parameter.detach()[grid].flatten().contiguous().view(torch.uint8)  # NaN, too, equals itself
            by_device.setdefault(parameter.device, []).append(values)
        self._values = [torch.cat(values) for values in by_device.values()]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WeightState)
            and self._counters == other._counters
            and all(map(torch.equal, self._values, other._values))
        )

    __hash__ = None  # type: ignore[assignment]


def _stored(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the numbers of `tensor`: itself, or those in a wrapper such as torchao's."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _stored(getattr(tensor, name))]


def _structure(model: Any) -> tuple[object, ...]:
    marks: list[object] = [repr(_settings(model.config.to_dict()))]
    for module in model.modules():
        marks += [id(module), type(module), getattr(type(module), "forward", None)]
        for name, value in lasting_attributes(module).items():
            if "_hooks_" in name or name in _OF_TRAINING:  # the former name hooks that take keywords
                continue
            if isinstance(value, _PLAIN):
                marks.append((name, value))
            elif name in HOOK_DICTS:
                marks += map(id, value.values())
            elif isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
                marks.append((name, tuple(value)))
            elif isinstance(value, dict) and all(isinstance(item, _PLAIN) for item in value.values()):
                marks.append((name, tuple(value.items())))
            elif name == "forward":
                marks.append(id(value))
    tensors = (*model.parameters(), *model.buffers())
    return (*marks, *((tensor.dtype, tensor.device) for tensor in tensors))


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the entries that `save_pretrained` adds."""
    written = ("architectures", "dtype")
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in written
    }


# ---- snapshots: to read all modules anew takes as long as a forward -------------------------------------------------


class Snapshot:
    """Content of the modules of `network`: classes and forwards, attributes and elements of container attributes,
    configs, and kind, dtype and device of tensors, but not their identity, nor marks of training
    (:mod:`~spec_trl.generation.engine.network.training_marks`).

    Attributes:
        is_complete: False for a network with hooks, methods or closures as attributes, whose effect may change unseen,
            or with attributes that lead back to it: a reference would keep it alive for ever. Such a snapshot is
            empty, and serves one call.
    """

    def __init__(self, network: nn.Module) -> None:
        self._facts: dict[str, Any] = {}
        modules = list(network.modules())
        states = [_state_of(module) for module in modules]
        values = [value for state in states for value in state.values()]
        is_hooked = any(state.get(name) for state in states for name in HOOK_DICTS)
        self.is_complete = not (is_hooked or any(map(_may_change, values)) or _lead_to(network, values, modules[1:]))
        if not self.is_complete:
            return
        self._below = modules[1:]
        # A forward may be replaced.
        self._kinds = [(type(module), getattr(type(module), "forward", None)) for module in modules]
        self._states = states
        self._owners = [state.get(name) for state in states for name in _TENSORS]
        self._kinds_of_tensors = self._read_tensors()
        configs = {id(value): value for value in values if isinstance(value, PreTrainedConfig)}
        self._configs = [(config, copy.deepcopy(vars(config))) for config in configs.values()]

    def find(self, name: str, find: Callable[[], T]) -> T:
        """Returns the fact `name`, computed by `find` once."""
        if name not in self._facts:
            self._facts[name] = find()
        fact: T = self._facts[name]
        return fact

    def holds(self, network: nn.Module) -> bool:
        try:
            for module, kind, state in zip([network, *self._below], self._kinds, self._states, strict=True):
                # Comparing identities is cheap; few modules have marks of training.
                if kind != (type(module), getattr(type(module), "forward", None)) or (
                    vars(module) != state and _state_of(module) != state
                ):
                    return False
            for config, settings in self._configs:
                if vars(config) != settings:
                    return False
            return self._read_tensors() == self._kinds_of_tensors
        except (RuntimeError, ValueError):  # a different tensor or array: its comparison has no single truth value
            return False

    def _read_tensors(self) -> list[Any]:
        tensors = chain.from_iterable(map(dict.values, filter(None, self._owners)))
        return [tensor if tensor is None else (type(tensor), tensor.dtype, tensor.device) for tensor in tensors]


def snapshot_of(network: nn.Module) -> Snapshot:
    """Returns the last snapshot of `network` if it holds; else a new one."""
    snapshot = _snapshots.get(network)
    if snapshot is None or not snapshot.holds(network):
        snapshot = Snapshot(network)
        if snapshot.is_complete:
            _snapshots[network] = snapshot
    return snapshot


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Content of `module`, without marks of training; containers are copied."""
    return {
        name: value.copy() if name not in _TENSORS and isinstance(value, dict | list | set) else value
        for name, value in lasting_attributes(module).items()
    }


def _may_change(value: Any) -> bool:
    """Whether `value` is code with bound values, not a plain function of a module."""
    if type(value) not in _CODE:
        return False
    if not isinstance(value, FunctionType):
        return True
    return bool(value.__closure__) or not all(isinstance(default, (*_PLAIN, type(None))) for default in held(value))


def _lead_to(network: nn.Module, values: Sequence[Any], below: Sequence[nn.Module]) -> bool:
    """Whether `values`, shared with the modules `below` the network, reference `network`, or too many objects to
    search."""
    seen: dict[int, Any] = {id(module): module for module in below}  # holds the objects, so that ids stay unique
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
