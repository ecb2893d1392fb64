"""Connects ranks while they decode: counters and notes in a store, tensors from rank to rank. No call is collective:
no rank waits for a rank that decodes."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor


T = TypeVar("T")

REMEDY = "died or hangs. Look at its output, and resume from the last checkpoint."
_OF_GLOO = re.compile("gloo|Application timeout caused pair closure")  # gloo has no exception class for it
POLL_SECONDS = (0.001, 0.02)
"""First and longest pause of a waiting rank between two reads of the store. The first is much shorter than a decoding
round. Pauses grow by a tenth, since one store serves all ranks."""
IDLE = "idle"
"""Counter of ranks without rows; when it equals the number of ranks, the rollout is over."""


@contextmanager
def naming_the_remedy(rank: int) -> Iterator[None]:
    """Adds a remedy to errors of collective calls that `rank` makes inside, our calls and those of libraries.

    Raises:
        RuntimeError: a collective call failed; its error is the cause. Other errors pass unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if REMEDY in message or not (isinstance(error, dist.DistError) or _OF_GLOO.search(message)):
            raise
        raise RuntimeError(f"rank {rank} waits for the other ranks, and one of them {REMEDY} {error}") from error


class Transfer:
    """A transfer of `tensor` to or from another rank, started by `dist.isend` or `dist.irecv`. Raises RuntimeError if
    the other rank is gone, or takes more than `timeout` seconds."""

    def __init__(
        self, begin: Callable[[Tensor, int], dist.Work | None], tensor: Tensor, rank: int, timeout: float
    ) -> None:
        self._rank, self._timeout = rank, timedelta(seconds=timeout)
        with self._naming_the_rank():
            self._work = begin(tensor, rank)

    def wait(self) -> None:
        assert self._work is not None
        with self._naming_the_rank():
            self._work.wait(self._timeout)

    @contextmanager
    def _naming_the_rank(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"rank {self._rank}, with which rows are exchanged, {REMEDY} {error}") from error


class Link:
    """One rank's access to the other ranks.

    Args:
        store: shared by all ranks; keys of a rollout begin with a prefix of that rollout.
        rank, ranks: this rank, and how many there are.
        timeout: most seconds of silence of all other ranks while a rank waits.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: float) -> None:
        self._store = store
        self.rank, self.ranks, self.timeout = rank, ranks, timeout

    @staticmethod
    def rows_of(rank: int) -> str:
        """Store key of a rank's heartbeat: its row count (-1 = idle) and a counter."""
        return f"rows/{rank}"

    def count(self, counter: str, by: int = 0) -> int:
        """Adds `by` to a counter (at first 0) and returns the new value, different on all ranks."""
        return self._ask(self._store.add, counter, by)

    def post(self, note: str, text: str) -> None:
        """Writes a note for all ranks, replacing an older one."""
        self._ask(self._store.set, note, text)

    def claim(self, note: str) -> bool:
        """Writes this rank on a note if the note does not exist; only one of several ranks succeeds."""
        return self._ask(self._store.compare_set, note, "", str(self.rank)) == str(self.rank).encode()

    def is_written(self, *notes: str) -> bool:
        return self._ask(self._store.check, list(notes))

    def read(self, notes: list[str]) -> list[str]:
        """Reads notes, and waits for missing ones within the timeout."""
        self._ask(self._store.wait, notes, timedelta(seconds=self.timeout))
        return [text.decode() for text in self._ask(self._store.multi_get, notes)]

    def read_rows(self) -> list[str]:
        """Reads every rank's heartbeat; "" if a rank has not written any."""
        notes = [self.rows_of(rank) for rank in range(self.ranks)]
        if self.is_written(*notes):
            return self.read(notes)
        return [self.read([note])[0] if self.is_written(note) else "" for note in notes]

    def erase(self, notes: list[str]) -> None:
        """Removes existing ones of the notes and counters."""
        for note in notes:
            self._ask(self._store.delete_key, note)

    def await_note(self, note: str) -> str:
        """Waits for a note and returns it.

        Raises:
            RuntimeError: no decoding rank has written anything for `timeout` seconds.
        """
        watch, pause = Watch(self), POLL_SECONDS[0]
        while not self.is_written(note):
            time.sleep(pause)
            pause = min(1.1 * pause, POLL_SECONDS[1])
            watch.look()
        return self.read([note])[0]

    def _ask(self, action: Callable[..., T], *arguments: object) -> T:
        """The store's answer. A thread makes the call, which waits for ever if the store's process is stopped.

        Raises:
            RuntimeError: the store does not answer, or another rank did not write in time.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(action(*arguments))
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=run, daemon=True).start()
        try:
            return answer.result(self.timeout + 1)  # a second later than the store's timeout
        except dist.DistStoreError as error:
            raise RuntimeError(f"rank {self.rank} waits for another rank, which {REMEDY} {error}") from error
        except (dist.DistError, TimeoutError) as error:
            raise RuntimeError(
                f"rank {self.rank} no longer reaches the store of the job: the process that holds it, rank 0 or the "
                f"launcher, {REMEDY} {str(error) or f'It gave no answer for {self.timeout:.0f} s (ddp_timeout).'}"
            ) from error

    def send(self, tensor: Tensor, rank: int) -> Transfer:
        """Begins to send a tensor; it must not change until the result's `wait` returns."""
        return Transfer(dist.isend, tensor, rank, self.timeout)

    def receive(self, tensor: Tensor, rank: int) -> Transfer:
        """Begins to receive a tensor of the same shape and dtype from `rank` into `tensor`."""
        return Transfer(dist.irecv, tensor, rank, self.timeout)


class Watch:
    """Watches the ranks that decode the pool of `link`, for a waiting rank."""

    def __init__(self, link: Link) -> None:
        self._link, self._rows = link, [""]
        self._changed = self._looked = time.perf_counter()

    def look(self) -> None:
        """Reads the heartbeats of the decoding ranks, at most once per second.

        Raises:
            RuntimeError: no heartbeat has changed for the link's `timeout`.
        """
        timeout = self._link.timeout
        if time.perf_counter() - self._looked < min(1.0, timeout / 4):
            return
        rows = self._link.read_rows()
        self._looked = time.perf_counter()
        if rows != self._rows:
            self._changed, self._rows = self._looked, rows
        if self._looked - self._changed > timeout:
            silent = [rank for rank, text in enumerate(rows) if not text.startswith("-1 ")]
            raise RuntimeError(
                f"rank {self._link.rank} waits for the rollout of ranks {silent or [*range(len(rows))]}, of which "
                f"nothing was heard for {timeout:.0f} s (ddp_timeout): one of them {REMEDY}"
            )

    def await_end(self) -> None:
        """Waits until all decoding ranks are done; raises like `look`."""
        while self._link.count(IDLE) < self._link.ranks:
            time.sleep(POLL_SECONDS[1])
            self.look()
