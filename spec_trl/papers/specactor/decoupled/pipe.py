"""Connects a verifier to its drafter: a queue for a thread, a process group for a rank."""

import os
from abc import ABC, abstractmethod
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from ....generation.engine.drafter import DraftCost, Drafter, DraftSession
from ....generation.engine.kv.cache import autocast_dtype
from ....generation.engine.rows import Rows
from ....generation.refusals import DECOUPLED, NOT_AHEAD, check
from .worker import DraftWorker, Kind, work


DRAFT_TIMEOUT = 60.0
"""Most seconds of a window. The first window includes reading prompts and requantizing a copy (seconds for billions of
weights); a slower drafter hangs. A hanging drafter is waited for once, again for its end, and then dropped."""
NOTHING = torch.zeros(0, dtype=torch.int64)


class DraftPipe(ABC):
    """Sends messages (:class:`Kind`) to a drafter on a thread or rank, and receives answers. Any failure raises; no
    call takes longer than the pipe's timeout."""

    strategy: str
    max_rows: int
    cost: DraftCost | None
    drafter: Drafter | None = None
    """The drafter if it is in this process, else None."""

    @abstractmethod
    def begin(self, session: DraftSession, vocabulary: int) -> None:
        """Makes the drafter begin a generation like `session`, over mirrored rows."""

    @abstractmethod
    def send(self, kind: Kind, values: Tensor) -> None:
        """Sends a message without waiting for it to be carried out."""

    @abstractmethod
    def receive(self) -> Tensor:
        """Waits for the answer to the newest DRAFT or END: a WINDOW's content. Raises the drafter's error."""

    @abstractmethod
    def end(self) -> None:
        """Ends the drafter's generation. Raises an error of the drafter after its last window."""


class DraftThread(DraftPipe):
    """Runs `drafter` on a thread, with the cores that the target leaves free, but at least one. The drafter has its
    own K/V cache; the policy's copy reads the target's, and writes only K/V of its drafts (SA §4.1).

    Transformers' processors act on drafts as on the target; users' processors may not be called by two threads, so
    drafts ignore them, at the cost of acceptance.

    Args:
        drafter: must be able to draft ahead (`Drafter.drafts_ahead`).
        timeout: most seconds of a window.

    Raises:
        ValueError: it cannot draft ahead.
    """

    def __init__(self, drafter: Drafter, timeout: float = DRAFT_TIMEOUT) -> None:
        check({DECOUPLED: True, NOT_AHEAD: not drafter.drafts_ahead and type(drafter).__name__})
        self.strategy, self.max_rows, self.cost = drafter.strategy, drafter.max_rows, drafter.cost
        self.drafter: Drafter = drafter
        self._timeout = timeout

    def begin(self, session: DraftSession, vocabulary: int) -> None:
        self._thread: Thread | None = None  # until the drafter starts
        self._messages, self._answers = SimpleQueue[tuple[Kind, Tensor]](), SimpleQueue[Tensor | Exception]()
        # Rows end, move and enter after `observe` has received the window: while the thread reads a row, only columns
        # under verification are written.
        assert session.target is not None
        worker = DraftWorker(self.drafter, mirrored(session), vocabulary, session.target.cache)
        # Settings that a thread does not inherit. torch fixes the number of threads per thread at its first query.
        autocast = autocast_dtype(session.rows.tokens.device)
        cores = max(idle_cores(), 1)

        def run() -> None:
            with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
                torch.set_num_threads(cores)
                work(self.drafter, lambda _: worker, self._messages.get, self._answers.put)

        self._thread = Thread(target=run, name="spec_trl drafter", daemon=True)  # may hang at exit
        self._thread.start()
        self.send(Kind.BEGIN, NOTHING)

    def send(self, kind: Kind, values: Tensor) -> None:
        self._messages.put((kind, values))

    def receive(self) -> Tensor:
        try:
            answer = self._answers.get(timeout=self._timeout)
        except Empty:
            raise TimeoutError(f"the drafter's thread gave no window within {self._timeout:g} s") from None
        try:
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            # Breaks the cycle of error and frame, or it would hold the caches until garbage collection.
            del answer

    def end(self) -> None:
        if self._thread is None:
            self.drafter.end()
            return
        self.send(Kind.END, NOTHING)
        self.send(Kind.CLOSE, NOTHING)
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            self.drafter.made_for, self.drafter.hangs_in = None, self._thread
            raise TimeoutError(f"the drafter's thread did not end within {self._timeout:g} s")
        torch.set_num_threads(torch.get_num_threads())  # later threads use the newest number
        while not self._answers.empty():
            self.receive()  # raises an error after the last window


def idle_cores() -> int:
    """Cores of this process beside torch's threads; negative: there are more threads."""
    # Only Linux reports a process's cores.
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return bound - torch.get_num_threads()


def mirrored(session: DraftSession) -> DraftSession:
    """Makes a session like `session`, over mirrored rows and without target. A row's drafts end at its limit, but rows
    with fewer drafts than others write one token more than verification."""
    rows = Rows(session.rows.capacity, session.rows.columns + 1, session.rows.tokens.device)
    return replace(session, rows=rows, pipeline=session.pipeline.over(rows), target=None, keep_logits=False)
