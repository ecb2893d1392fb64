"""The pipe from a verifier to its drafter: a queue here for a thread, a process group for a rank (`distributed/`)."""

import os
from abc import ABC, abstractmethod
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from ...engine.cache import autocast_dtype
from ...engine.drafter import DraftCost, Drafter, DraftSession
from ...engine.rows import Rows
from .worker import DraftWorker, Kind, work


DRAFT_TIMEOUT = 60.0
"""Seconds that a window may take. The first one waits until prompts are read and a copy is requantized, which takes
seconds for billions of weights; what is slower hangs. A hanging drafter is waited for once, and as long again for its
end: then it is dropped."""
NOTHING = torch.zeros(0, dtype=torch.int64)


class DraftPipe(ABC):
    """Moves messages (:class:`Kind`) to a drafter on a thread or rank, and answers back. Any failure raises; no call
    takes longer than the pipe's timeout."""

    strategy: str
    max_rows: int
    cost: DraftCost | None
    drafter: Drafter | None = None
    """The drafter, where it is in this process."""

    @abstractmethod
    def begin(self, session: DraftSession, vocabulary: int) -> None:
        """Has the drafter begin a generation like `session`, over mirrored rows."""

    @abstractmethod
    def send(self, kind: Kind, values: Tensor) -> None:
        """Sends a message; does not wait until it is carried out."""

    @abstractmethod
    def receive(self) -> Tensor:
        """Waits for the answer to the newest DRAFT or END: a WINDOW's content. Raises what the drafter raised."""

    @abstractmethod
    def end(self) -> None:
        """Has the drafter let go of the generation. Raises what it raised after its last window."""


class DraftThread(DraftPipe):
    """Runs `drafter` on a thread, with the cores that the target leaves, but at least one. The drafter has its K/V
    cache; the policy's copy reads the target's, and writes the K/V of its drafts alone (SA §4.1).

    Transformers' processors act on drafts as on the target; users' processors may not be called by two threads, and
    cost acceptance.

    Args:
        drafter: must be able to draft ahead (`Drafter.drafts_ahead`).
        timeout: seconds that a window may take.

    Raises:
        ValueError: it cannot draft ahead.
    """

    def __init__(self, drafter: Drafter, timeout: float = DRAFT_TIMEOUT) -> None:
        if not drafter.drafts_ahead:
            raise ValueError(
                f"{type(drafter).__name__} cannot be decoupled: it drafts from what the target has verified, hidden "
                "states or completions, and not from its own drafts, or its layers keep states, which cannot go back. "
                'Use the strategies "self", "model" or "ngram", or decoupled_execution="never".'
            )
        self.strategy, self.max_rows, self.cost = drafter.strategy, drafter.max_rows, drafter.cost
        self.drafter: Drafter = drafter
        self._timeout = timeout

    def begin(self, session: DraftSession, vocabulary: int) -> None:
        self._thread: Thread | None = None  # until the drafter has begun
        self._messages, self._answers = SimpleQueue[tuple[Kind, Tensor]](), SimpleQueue[Tensor | Exception]()
        # Rows end, move and come in when `observe` has taken the window: while the thread reads a row, only columns
        # that are verified are written.
        assert session.target is not None
        worker = DraftWorker(self.drafter, mirrored(session), vocabulary, session.target.cache)
        # Settings that a thread does not inherit. torch keeps the number of threads per thread once it was asked for.
        autocast = autocast_dtype(session.rows.tokens.device)
        cores = max(len(os.sched_getaffinity(0)) - torch.get_num_threads(), 1)

        def run() -> None:
            with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
                torch.set_num_threads(cores)
                work(self.drafter, lambda _: worker, self._messages.get, self._answers.put)

        self._thread = Thread(target=run, name="spec_trl drafter", daemon=True)  # one that hangs keeps no process
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
            # An error that holds this frame, which holds it, would keep the caches until they are collected.
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
        torch.set_num_threads(torch.get_num_threads())  # threads that come later have the newest number
        while not self._answers.empty():
            self.receive()  # raises what the drafter raised after the last window


def mirrored(session: DraftSession) -> DraftSession:
    """Like `session`, over mirrored rows and without target. A row's drafts end at its limit, but rows that draft less
    than others write one token more than verification."""
    rows = Rows(session.rows.capacity, session.rows.columns + 1, session.rows.tokens.device)
    return replace(session, rows=rows, pipeline=session.pipeline.over(rows), target=None, keep_logits=False)
