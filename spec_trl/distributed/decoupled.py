"""A drafter on a rank of its own (SA §4.1): the messages of decoupled execution over torch.distributed.

    if rank == 0:
        link = DraftRank(1)
        model.generate(**inputs, drafter=DecoupledDrafter(link))
        link.close()
    else:
        serve(SmallModelDrafter(assistant, model), verifier=0)

Messages lie in host memory, so both ranks need a group that can send from there: gloo, on GPUs too, where a process
group "cpu:gloo,cuda:nccl" has both. A receive must be given up after a time, which NCCL cannot do.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..generation.drafters.decoupled.messages import DraftLink, Kind
from ..generation.drafters.decoupled.thread import DRAFT_TIMEOUT
from ..generation.drafters.decoupled.worker import DraftWorker
from ..generation.engine.drafter import DraftCost, Drafter, DraftSession
from ..generation.engine.processors import LogitsPipeline
from ..generation.engine.rows import Rows


IDLE_SECONDS = 24 * 3600.0
"""Seconds between two messages after which :func:`serve` gives up by itself: a verifier may have a long break."""
_LOOK_SECONDS = 0.5  # between two looks whether a verifier that sends nothing is alive
_MAGIC = 0x5AEC7A11  # of a message's head
_MOST = 1 << 26  # numbers in a message: the prompts of thousands of rows, and no garbage that asks for more memory


@dataclass
class Channel:
    """Messages to and from one rank: a head of (magic number, running number, kind, length, check sum), then the
    content. Both are int64 in host memory.

    Args:
        rank: the other one, in the default group.
        group: that both are in; None: the default group.
    """

    rank: int
    group: dist.ProcessGroup | None = None
    sent: int = 0
    received: int = 0

    def send(self, kind: Kind, values: Tensor, seconds: float) -> None:
        """Sends within `seconds`, or raises RuntimeError."""
        self.sent += 1
        head = torch.tensor([_MAGIC, self.sent, kind, len(values), _check_sum(values)])  # [5]
        for part in (head, values) if len(values) else (head,):
            self._wait(dist.isend(part.contiguous(), self.rank, self.group), seconds)

    def receive(self, seconds: float) -> tuple[Kind, Tensor]:
        """The next message, `[n]` int64; raises RuntimeError where none comes within `seconds` or the other rank is
        gone, and ValueError where it is damaged."""
        self.received += 1
        head = torch.zeros(5, dtype=torch.int64)
        self._wait(dist.irecv(head, self.rank, self.group), seconds)
        magic, number, kind, length, check_sum = head.tolist()
        if magic != _MAGIC or number != self.received or not 0 <= length <= _MOST or kind not in {*Kind}:
            raise ValueError(f"rank {self.rank} sent {head.tolist()}, which begins no message {self.received}")
        values = torch.zeros(length, dtype=torch.int64)
        if length:
            self._wait(dist.irecv(values, self.rank, self.group), seconds)
        if _check_sum(values) != check_sum:
            raise ValueError(f"message {number} of rank {self.rank} ({Kind(kind).name}) is damaged")
        return Kind(kind), values

    def _wait(self, work: dist.Work | None, seconds: float) -> None:
        if work is None:
            raise ValueError(f"rank {self.rank} is this rank itself, or not in the group")
        work.wait(timedelta(seconds=seconds))


class DraftRank(DraftLink):
    """The way to a drafter that another rank runs by :func:`serve`.

    Of the logits processors, temperature, top-k, top-p and min-p act on its drafts; leaving out others costs
    acceptance. A rank that fails in any way, or gives no window in time, is lost: torch.distributed closes the
    connection. Later generations go on without drafts.

    Args:
        rank: the drafter's, in the default group.
        group: that both are in, with gloo for host memory; None: the default group.
        timeout: seconds that a window may take.
        strategy: the drafter's name in statistics.
        max_rows: most rows in flight with which it drafts.
        cost: of a forward of its network.
    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None = None,
        timeout: float = DRAFT_TIMEOUT,
        strategy: str = "model",
        max_rows: int = Drafter.max_rows,
        cost: DraftCost | None = None,
    ) -> None:
        self.strategy, self.max_rows, self.cost = strategy, max_rows, cost
        self._channel, self._timeout = Channel(rank, group), timeout
        self._loss: str | None = None
        self._owed = 0  # windows that were asked for and have not come

    def begin(self, session: DraftSession, vocabulary: int) -> None:
        rows = session.rows
        bits = torch.tensor(session.pipeline.warpers(), dtype=torch.float64).view(torch.int64)  # [4]
        sizes = torch.tensor([rows.capacity, rows.columns + 1, vocabulary, int(session.do_sample)])
        self.send(Kind.BEGIN, torch.cat([sizes, bits]))

    def send(self, kind: Kind, values: Tensor) -> None:
        self._require()
        self._owed += kind == Kind.DRAFT
        try:
            self._channel.send(kind, values, self._timeout)
        except Exception as error:
            self._lose(error)

    def receive(self) -> Tensor:
        self._require()
        try:
            kind, values = self._channel.receive(self._timeout)
            self._owed -= 1
            if kind not in (Kind.WINDOW, Kind.FAILED):
                raise ValueError(f"a {kind.name} came in place of a WINDOW")
        except Exception as error:
            self._lose(error)
        if kind == Kind.FAILED:
            text = bytes(values.to(torch.uint8).tolist()).decode(errors="replace")
            raise RuntimeError(f"the drafter of rank {self._channel.rank} failed: {text}")
        return values

    def end(self) -> None:
        if self._loss is not None:
            return
        while self._owed:  # where the target failed. First: with gloo a send waits for its receive, on either side
            self.receive()
        self.send(Kind.END, torch.zeros(0, dtype=torch.int64))

    def close(self) -> None:
        """Ends the other rank's :func:`serve`."""
        if self._loss is None:
            self.send(Kind.CLOSE, torch.zeros(0, dtype=torch.int64))

    def _require(self) -> None:
        if self._loss is not None:
            raise RuntimeError(self._loss)

    def _lose(self, error: Exception) -> NoReturn:
        self._loss = f"rank {self._channel.rank}, which drafts, is lost: {error}"
        raise RuntimeError(self._loss) from error


@torch.no_grad()
def serve(
    drafter: Drafter,
    verifier: int,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    timeout: float = DRAFT_TIMEOUT,
    look: Callable[[], None] = lambda: None,
) -> bool:
    """Drafts for the rank `verifier` until it closes its :class:`DraftRank`, or is gone.

    Args:
        drafter: drafts on this rank; must be able to draft ahead. A copy does not keep its policy alive: keep it.
        verifier: a rank of the default group.
        device: where it drafts.
        group: that both are in, as given to :class:`DraftRank`.
        timeout: seconds that the verifier may take to receive a window.
        look: is called again and again while the verifier sends nothing. What it raises ends the wait.

    Returns:
        Whether the verifier has closed it; False: with a warning, the connection is lost.

    Raises:
        ValueError: the drafter cannot draft ahead.
    """
    if not drafter.drafts_ahead:
        raise ValueError(f"drafter={type(drafter).__name__} cannot draft ahead; serve a small model or the copy.")
    channel = Channel(verifier, group)
    try:
        _serve(drafter, channel, device, timeout, look)
    except _Lost as lost:
        error = lost.__cause__
        warnings.warn(f"nothing is drafted for rank {verifier} any more: {error}", stacklevel=2)
        with suppress(RuntimeError):
            channel.send(Kind.FAILED, _text(error), timeout)
        return False
    return True


class _Lost(Exception):
    """The verifier is gone, or what it sent is damaged; the cause says how."""


class _Inbox:
    """Receives the messages of `channel` on a thread, up to CLOSE: over gloo a receive cannot be tried, and giving one
    up closes the connection."""

    def __init__(self, channel: Channel) -> None:
        self._arrived: SimpleQueue[tuple[Kind, Tensor] | Exception] = SimpleQueue()
        Thread(target=self._receive, args=(channel,), daemon=True).start()

    def _receive(self, channel: Channel) -> None:
        kind = None
        try:
            while kind != Kind.CLOSE:
                kind, values = channel.receive(IDLE_SECONDS)
                self._arrived.put((kind, values))
        except Exception as error:
            self._arrived.put(error)

    def next(self, look: Callable[[], None]) -> tuple[Kind, Tensor]:
        """Waits for the next message, with a `look` in between."""
        while True:
            try:
                message = self._arrived.get(timeout=_LOOK_SECONDS)
            except Empty:
                look()
                continue
            if isinstance(message, Exception):
                raise _Lost from message
            return message


def _serve(
    drafter: Drafter, channel: Channel, device: torch.device | str, timeout: float, look: Callable[[], None]
) -> None:
    """Carries out messages until CLOSE."""
    worker, failure, inbox = None, "", _Inbox(channel)
    while True:
        kind, values = inbox.next(look)
        if kind == Kind.CLOSE:
            return
        window = None
        try:
            if kind == Kind.BEGIN:
                failure, worker = "", _begin(drafter, values, device)
            elif not failure:
                assert worker is not None, f"{kind.name} came before BEGIN"
                window = worker.handle(kind, values)
        except Exception as error:  # said in the next answer; the drafter is ready again for the next generation
            failure = f"{type(error).__name__}: {error}"
            with suppress(Exception):
                drafter.end()
        if kind == Kind.DRAFT:
            answer = (Kind.FAILED, _text(failure)) if window is None else (Kind.WINDOW, window)
            try:
                channel.send(*answer, timeout)
            except RuntimeError as error:
                raise _Lost from error


def _begin(drafter: Drafter, values: Tensor, device: torch.device | str) -> DraftWorker:
    capacity, columns, vocabulary, do_sample = values[:4].tolist()
    rows = Rows(capacity, columns, torch.device(device))
    pipeline = LogitsPipeline.of_warpers(values[4:].view(torch.float64).tolist(), rows)
    return DraftWorker(drafter, DraftSession(rows, pipeline, bool(do_sample), None, keep_logits=False), vocabulary)


def _text(what: object) -> Tensor:
    """`[n]` int64, the UTF-8 bytes of what it says."""
    return torch.tensor([*str(what).encode()], dtype=torch.int64)


def _check_sum(values: Tensor) -> int:
    return int(values.sum())  # wraps modulo 2**64
