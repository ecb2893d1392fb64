"""Stores objects that the next call for a model reuses: one session per model.

A call borrows the session of its model. When it begins, the fingerprint of the model (modules, hooks, plain attributes
such as active adapters and their scaling, dtypes and devices) is compared with that of the last call, and objects made
for another structure are dropped.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from ..papers import Calibration
from .engine.network.snapshot import SNAPSHOTS, Snapshot, snapshot_of, structure
from .planner.clock import Clock
from .planner.control import Control


if TYPE_CHECKING:
    from .engine.cuda.graph_runner import GraphRunner
    from .engine.drafter import Drafter


_sessions: "WeakKeyDictionary[nn.Module, Session]" = WeakKeyDictionary()


class Shadow(NamedTuple):
    """The network that ran the last call, with its first snapshot."""

    network: PreTrainedModel
    exact: bool
    snapshot: Snapshot


class CachedControl(NamedTuple):
    """A control, made from the `sources` profile and ladder, or from a probed `clock`."""

    sources: tuple[Calibration, Calibration]
    control: Control
    clock: Clock | None


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
        self.ladder: Calibration = None
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
        present = snapshot.structure(model) if self._depends else None
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
        SNAPSHOTS.pop(module, None)
        session = _sessions.pop(module, None)
        if session is not None and session._in_use.acquire(blocking=False):
            session.clear()
