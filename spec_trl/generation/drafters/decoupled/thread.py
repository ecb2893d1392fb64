"""A drafter on a thread of its own, next to the target on a CPU."""

import os
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeAlias

import torch
from torch import Tensor

from ...engine.cache import autocast_dtype
from ...engine.drafter import Drafter, DraftSession
from ...engine.rows import Rows
from .messages import DraftLink, Kind
from .worker import DraftWorker


DRAFT_TIMEOUT = 60.0
"""Seconds that a window may take. The first one waits until prompts are read and a copy is requantized, which takes
seconds for billions of weights; what is slower hangs. It is waited for once, and as long again for the thread to end:
then the drafter is dropped."""

_Messages: TypeAlias = "SimpleQueue[tuple[Kind, Tensor]]"
_Answers: TypeAlias = "SimpleQueue[Tensor | Exception]"


class DraftThread(DraftLink):
    """Runs `drafter` on a thread, with the cores that the target leaves, but at least one. The K/V cache is the
    drafter's own; the policy's copy reads the target's, and owns the K/V of its drafts alone (SA §4.1).

    Transformers' own logits processors act on drafts as on the target; users' own may not be called by two threads,
    and cost acceptance.

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
                'states or completions, and not from its own drafts. Use the strategies "self", "model" or "ngram", '
                'or decoupled_execution="never".'
            )
        self.strategy, self.max_rows, self.cost = drafter.strategy, drafter.max_rows, drafter.cost
        self._drafter, self._timeout = drafter, timeout

    def claim(self) -> AbstractContextManager[None]:
        return self._drafter.claim()

    def begin(self, session: DraftSession, vocabulary: int) -> None:
        self._thread: Thread | None = None  # until the drafter has begun
        self._messages, self._answers = SimpleQueue[tuple[Kind, Tensor]](), SimpleQueue[Tensor | Exception]()
        rows = session.rows
        # A row's drafts end at its limit; rows that draft less than others write one token more than verification.
        mirror = Rows(rows.capacity, rows.columns + 1, rows.tokens.device)
        pipeline = session.pipeline.over(mirror)
        own = DraftSession(mirror, pipeline, session.do_sample, None, False, session.most_drafted)
        # Rows end, move and come in when `observe` has taken the window: while the thread reads a row, only columns
        # that are verified are written.
        assert session.target is not None
        worker = DraftWorker(self._drafter, own, vocabulary, session.target.cache)
        # Settings that a thread does not inherit. torch keeps the number of threads per thread once it was asked for.
        cores = max(len(os.sched_getaffinity(0)) - torch.get_num_threads(), 1)
        self._thread = Thread(
            target=_work,
            args=(worker, self._messages, self._answers, cores, autocast_dtype(mirror.tokens.device)),
            name="spec_trl drafter",
            daemon=True,  # one that hangs does not keep the process from ending
        )
        self._thread.start()

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
        if self._thread is not None:
            self.send(Kind.END, torch.zeros(0, dtype=torch.int64))
            self._thread.join(self._timeout)
            if self._thread.is_alive():
                self._drafter.made_for, self._drafter.hangs_in = None, self._thread
                raise TimeoutError(f"the drafter's thread did not end within {self._timeout:g} s")
            torch.set_num_threads(torch.get_num_threads())  # threads that come later have the newest number
        self._drafter.end()
        while not self._answers.empty():
            self.receive()  # raises what went wrong after the last window

    @property
    def forwards(self) -> int:
        return self._drafter.forwards

    @property
    def cache_bytes(self) -> int:
        return self._drafter.cache_bytes


def _work(
    worker: DraftWorker, messages: _Messages, answers: _Answers, cores: int, autocast: torch.dtype | None
) -> None:
    """What the thread does: carries out messages until END, or until one raises."""
    try:
        with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
            torch.set_num_threads(cores)
            while (message := messages.get())[0] != Kind.END:
                if (answer := worker.handle(*message)) is not None:
                    answers.put(answer)
    except Exception as error:
        answers.put(error)
