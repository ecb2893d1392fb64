"""What calls for one model leave to the next: one session per model, one fingerprint, one release.

A call borrows the session of its model. When it begins, the fingerprint of the model (modules, hooks, plain attributes
such as active adapters and their scaling, dtypes and devices) is compared with that of the last call, and what was
made for another structure goes. The values of the weights may change: who copies them compares :class:`WeightState`,
and captured forwards, which read them where they lie, compare :func:`addresses`.
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
from transformers import PreTrainedConfig, PreTrainedModel

from .engine.training_marks import HOOK_DICTS, held, lasting_attributes


if TYPE_CHECKING:
    from ..specactor.ladder import Ladder
    from .engine.drafter import Drafter
    from .engine.graph_runner import GraphRunner
    from .strategies import KeptControl


T = TypeVar("T")
_TENSORS = "_parameters", "_buffers"  # a shadow has the same dicts; copies would keep alive what leaves them
_CODE = {FunctionType, MethodType, partial}
_PLAIN = (bool, int, float, str)
_OF_TRAINING = ("training", "gradient_checkpointing")  # which a shadow, in eval mode, does not act on
# Objects that attributes may lead to, beside what lies in them: to look at these takes a few milliseconds.
_MOST_OBJECTS = 10_000
_VALUES = 256  # of a weight that are compared; an optimizer step moves most of them
_sessions: "WeakKeyDictionary[nn.Module, Session]" = WeakKeyDictionary()
_snapshots: "WeakKeyDictionary[nn.Module, Snapshot]" = WeakKeyDictionary()


# ---- sessions -----------------------------------------------------------------------------------------------------


class Shadow(NamedTuple):
    """The network that ran the last call, and its snapshot when it was made."""

    network: PreTrainedModel
    exact: bool
    snapshot: "Snapshot"


class Session:
    """What calls for one model share, one call at a time. Nothing in it may hold the model, or it would never die.

    Attributes:
        snapshot: of the model, taken or compared when the call began; None before the first call.
        shadow: the network that the last call ran. It stays while the snapshot does.
        runner: with the forwards that it captured. It stays while the structure of the model does.
        drafters: by strategy. They stay while the structure does, or longer (`Drafter.outlives_changes`).
        controls: by the drafters and options that they serve, with what they have measured.
        ladder: of the drafters that were profiled last.
        acceptance: first-token acceptance by strategy.
        heads: whether a checkpoint, by its name, has an MTP head that can draft for the model.
    """

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.shadow: Shadow | None = None
        self.runner: GraphRunner | None = None
        self.drafters: dict[str, Drafter] = {}
        self.controls: dict[str, KeptControl] = {}
        self.ladder: Ladder | None = None
        self.acceptance: dict[str, float] = {}
        self.heads: dict[str, bool] = {}
        self._structure: tuple[object, ...] | None = None  # of the model for which drafters and runner were made
        self._in_use = Lock()
        self._spare: Session | None = None  # for a call that begins while this one is lent

    @classmethod
    def of(cls, model: nn.Module) -> "Session":
        """The session of `model`."""
        return _sessions.setdefault(model, cls())

    @classmethod
    def below(cls, model: nn.Module) -> "list[Session]":
        """The sessions of `model` and what it wraps, and their spare ones."""
        sessions = [_sessions[module] for module in model.modules() if module in _sessions]
        for session in sessions:
            if session._spare is not None:
                sessions.append(session._spare)
        return sessions

    @classmethod
    @contextmanager
    def lend(cls, model: nn.Module) -> "Iterator[Session]":
        """Lends the session of `model` to one call. A call that begins while another one runs gets a spare one, which
        serves the next such call too, but captures nothing for it. A session that is released meanwhile ends with the
        call."""
        first = session = cls.of(model)
        while not session._in_use.acquire(blocking=False):
            if session._spare is None:
                session._spare = cls()
            session = session._spare
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
        """Drops what was made for `model` before it changed."""
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
        """Whether something was made for one structure of the model."""
        return self.runner is not None or any(not drafter.outlives_changes for drafter in self.drafters.values())

    def check_shadow(self) -> None:
        """Drops the shadow if a call has left something on it."""
        if self.shadow is not None:
            snapshot = self.shadow.snapshot
            if not (snapshot.is_complete and snapshot.holds(self.shadow.network)):
                self.shadow = None

    def drop_runner(self) -> None:
        """Frees what was captured. A runner and its captures hold each other, so this takes a collection: 0.3 s."""
        if self.runner is not None:
            self.runner = None
            gc.collect()

    def clear(self) -> None:
        """Frees all, and what the spare one has, unless a call has that."""
        spare, self._spare = self._spare, None
        if spare is not None and spare._in_use.acquire(blocking=False):
            spare.clear()
        self.snapshot = self.shadow = self.ladder = self._structure = None
        self.drafters, self.controls, self.acceptance, self.heads = {}, {}, {}, {}
        self.drop_runner()


def capturing_session(model: nn.Module) -> Session | None:
    """The session of `model`, also if it is wrapped, in which a runner with captured forwards waits for a call."""
    return next((session for session in Session.below(model) if session.runner is not None), None)


def release(model: nn.Module) -> None:
    """Frees all that is kept for `model`, also if it is wrapped: the K/V cache and captured forwards, the quantized
    copy, a drafter of `"tts"` with what it has learned, the texts of earlier calls, and what is known of drafters and
    rounds. What a running call uses is freed when that call ends.
    """
    for module in model.modules():
        _snapshots.pop(module, None)
        session = _sessions.pop(module, None)
        if session is not None and session._in_use.acquire(blocking=False):
            session.clear()


# ---- fingerprints -------------------------------------------------------------------------------------------------


def structure(model: nn.Module) -> tuple[object, ...]:
    """What decides the weights of `model` and is no weight: modules, their hooks and plain attributes, such as which
    adapters are active, merged or scaled, and the dtypes and devices of their tensors. While it stays equal, a copy
    of `model` needs new weights at most."""
    return snapshot_of(model).find("structure", partial(_structure, model))


def addresses(network: nn.Module) -> tuple[int, ...]:
    """Where the parameters and buffers of `network` lie."""
    return tuple(tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers()))


class WeightState:
    """Where the parameters of `network` lie, how often they were written to, and some of their values: fused
    optimizers and writes through `.data` move no version counter. What changes other values alone in such a way is
    not seen. Takes 2 ms with 272 parameters."""

    def __init__(self, network: nn.Module) -> None:
        parameters = list(network.parameters())
        self._counters = [(parameter.data_ptr(), parameter._version) for parameter in parameters]
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            points = round(_VALUES ** (1 / max(1, parameter.dim())))  # in a dimension: at most twice as many
            grid = tuple(slice(None, None, max(1, size // points)) for size in parameter.shape)
            by_device.setdefault(parameter.device, []).append(parameter.detach()[grid].reshape(-1))
        self._values = [torch.cat(values) for values in by_device.values()]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WeightState)
            and self._counters == other._counters
            and all(map(torch.equal, self._values, other._values))
        )

    __hash__ = None  # type: ignore[assignment]


def _structure(model: Any) -> tuple[object, ...]:
    marks: list[object] = [repr(_settings(model.config.to_dict()))]
    for module in model.modules():
        marks += [id(module), type(module), type(module).forward]
        for name, value in lasting_attributes(module).items():
            if "_hooks_" in name or name in _OF_TRAINING:  # the former say which hooks take keywords
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
    """A config without what `save_pretrained` writes into it."""
    written = ("architectures", "dtype")
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in written
    }


# ---- snapshots: to read all modules anew takes as long as a forward -------------------------------------------------


class Snapshot:
    """What the modules of `network` hold: their classes and forwards, attributes, what lies in attributes that are
    containers, configs, and kind, dtype and device of tensors, but not which tensors these are; and without what
    training leaves on them (:mod:`~spec_trl.generation.engine.training_marks`).

    Attributes:
        is_complete: False for a network with hooks, methods or closures as attributes, since what they do may change
            unseen, and for one whose attributes lead to itself: what is kept would hold it for ever. Such a snapshot
            holds nothing, and serves one call.
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
        self._kinds = [(type(module), type(module).forward) for module in modules]  # a forward may be replaced
        self._states = states
        self._owners = [state[name] for state in states for name in _TENSORS]
        self._kinds_of_tensors = self._read_tensors()
        configs = {id(value): value for value in values if isinstance(value, PreTrainedConfig)}
        self._configs = [(config, copy.deepcopy(vars(config))) for config in configs.values()]

    def find(self, name: str, find: Callable[[], T]) -> T:
        """What `find` returned when the fact `name` was asked for first."""
        if name not in self._facts:
            self._facts[name] = find()
        fact: T = self._facts[name]
        return fact

    def holds(self, network: nn.Module) -> bool:
        """Whether nothing of it has changed."""
        try:
            for module, kind, state in zip([network, *self._below], self._kinds, self._states, strict=True):
                # To see that values are the same objects takes little; few modules have marks of training.
                if kind != (type(module), type(module).forward) or (
                    vars(module) != state and _state_of(module) != state
                ):
                    return False
            for config, settings in self._configs:
                if vars(config) != settings:
                    return False
            return self._read_tensors() == self._kinds_of_tensors
        except (RuntimeError, ValueError):  # another tensor or array stands where one stood: they have no one truth
            return False

    def _read_tensors(self) -> list[Any]:
        tensors = chain.from_iterable(map(dict.values, filter(None, self._owners)))
        return [tensor if tensor is None else (type(tensor), tensor.dtype, tensor.device) for tensor in tensors]


def snapshot_of(network: nn.Module) -> Snapshot:
    """The last snapshot of `network`, where it holds; else a new one."""
    snapshot = _snapshots.get(network)
    if snapshot is None or not snapshot.holds(network):
        snapshot = Snapshot(network)
        if snapshot.is_complete:
            _snapshots[network] = snapshot
    return snapshot


def _state_of(module: nn.Module) -> dict[str, Any]:
    """What `module` holds, without marks of training; its containers are copied."""
    return {
        name: value.copy() if name not in _TENSORS and isinstance(value, dict | list | set) else value
        for name, value in lasting_attributes(module).items()
    }


def _may_change(value: Any) -> bool:
    """Whether `value` is code that holds values, and is not just a function of a module."""
    if type(value) not in _CODE:
        return False
    if not isinstance(value, FunctionType):
        return True
    return bool(value.__closure__) or not all(isinstance(default, (*_PLAIN, type(None))) for default in held(value))


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
