"""Runs a drafter on another rank (SA §4.1), over torch.distributed.

    if rank == 0:
        pipe = DraftRank(1)
        model.generate(**inputs, drafter=DecoupledDrafter(pipe))
        pipe.close()
    else:
        serve(SmallModelDrafter(assistant, model), verifier=0)

Messages are in host memory, so both ranks need a group that can send from it: gloo, also on GPUs, in a process group
"cpu:gloo,cuda:nccl". A receive needs a timeout, and NCCL has none.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.link import Link, Watch
from ...generation.engine.drafter import DraftCost, Drafter, DraftSession
from ...generation.engine.rows import Rows
from ...generation.engine.sampling.processors import LogitsPipeline
from .decoupled.decoupled_drafter import DecoupledDrafter
from .decoupled.pipe import DRAFT_TIMEOUT, NOTHING, DraftPipe
from .decoupled.worker import DraftWorker, Kind, work


IDLE_SECONDS = 24 * 3600.0
"""Most seconds of silence before :func:`serve` ends by itself: a verifier may pause for long."""
_LOOK_SECONDS = 0.5  # between two checks that a silent verifier is alive
_MAGIC = 0x5AEC7A11  # the first number of a message's head
_MOST = 1 << 26  # numbers in a message: prompts of thousands of rows; a bound against damaged heads


@dataclass
class Channel:
    """Messages to and from one rank: a head of (magic number, running number, kind, length, check sum), then the
    content. Both are int64 in host memory.

    Args:
        rank: the other rank, in the default group.
        group: a group of both; None: the default group.
    """

    rank: int
    group: dist.ProcessGroup | None = None
    sent: int = 0
    received: int = 0

    def send(self, kind: Kind, values: Tensor, seconds: float) -> None:
        """Sends within `seconds`, or raises RuntimeError."""
        self.sent += 1
        head = torch.tensor([_MAGIC, self.sent, kind, len(values), int(values.sum())])  # [5]; a sum modulo 2**64
        for part in (head, values) if len(values) else (head,):
            self._wait(dist.isend(part.contiguous(), self.rank, self.group), seconds)

    def receive(self, seconds: float) -> tuple[Kind, Tensor]:
        """Receives the next message, `[n]` int64. Raises RuntimeError if no message comes within `seconds` or the
        other rank is gone, and ValueError if the message is damaged."""
        self.received += 1
        head = torch.zeros(5, dtype=torch.int64)
        self._wait(dist.irecv(head, self.rank, self.group), seconds)
        magic, number, kind, length, check_sum = head.tolist()
        if magic != _MAGIC or number != self.received or not 0 <= length <= _MOST or kind not in {*Kind}:
            raise ValueError(f"rank {self.rank} sent {head.tolist()}, which begins no message {self.received}")
        values = torch.zeros(length, dtype=torch.int64)
        if length:
            self._wait(dist.irecv(values, self.rank, self.group), seconds)
        if int(values.sum()) != check_sum:
            raise ValueError(f"message {number} of rank {self.rank} ({Kind(kind).name}) is damaged")
        return Kind(kind), values

    def _wait(self, work: dist.Work | None, seconds: float) -> None:
        if work is None:
            raise ValueError(f"rank {self.rank} is this rank itself, or not in the group")
        work.wait(timedelta(seconds=seconds))


class DraftRank(DraftPipe):
    """The pipe to a drafter that another rank runs by :func:`serve`.

    Of the logits processors, temperature, top-k, top-p and min-p act on its drafts; without the others fewer drafts
    are accepted. A rank that fails, or sends no window in time, is lost, since torch.distributed closes the
    connection: later generations run without drafts.

    Args:
        rank: the drafting rank, in the default group.
        group: contains both ranks, with gloo for host memory; None: the default group.
        timeout: most seconds of a window.
        strategy: the drafter's name in statistics.
        max_rows: most rows in flight that it drafts for.
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

    def begin(self, session: DraftSession, vocabulary: int) -> None:
        rows = session.rows
        bits = torch.tensor(session.pipeline.warpers(), dtype=torch.float64).view(torch.int64)  # [4]
        sizes = torch.tensor([rows.capacity, rows.columns + 1, vocabulary, int(session.do_sample)])
        self.send(Kind.BEGIN, torch.cat([sizes, bits]))

    def send(self, kind: Kind, values: Tensor) -> None:
        self._require_connection()
        try:
            self._channel.send(kind, values, self._timeout)
        except Exception as error:
            self._lose(error)

    def receive(self) -> Tensor:
        self._require_connection()
        try:
            kind, values = self._channel.receive(self._timeout)
            if kind not in (Kind.WINDOW, Kind.FAILED):
                raise ValueError(f"a {kind.name} came in place of a WINDOW")
        except Exception as error:
            self._lose(error)
        if kind == Kind.FAILED:
            text = bytes(values.to(torch.uint8).tolist()).decode(errors="replace")
            raise RuntimeError(f"the drafter of rank {self._channel.rank} failed: {text}")
        return values

    def end(self) -> None:
        self.send(Kind.END, NOTHING)
        self.receive()

    def close(self) -> None:
        """Ends the other rank's :func:`serve`."""
        if self._loss is None:
            self.send(Kind.CLOSE, NOTHING)

    def _require_connection(self) -> None:
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
        drafter: drafts on this rank, ahead of the verifier. A quantized copy does not keep its policy alive.
        verifier: a rank of the default group.
        device: of the drafter.
        group: contains both ranks, as passed to :class:`DraftRank`.
        timeout: seconds that the verifier may take to receive a window.
        look: called repeatedly while the verifier is silent; an exception of it ends the wait.

    Returns:
        True if the verifier closed the pipe; False, with a warning, if the connection was lost.

    Raises:
        ValueError: the drafter cannot draft ahead.
    """
    if not drafter.drafts_ahead:
        raise ValueError(f"drafter={type(drafter).__name__} cannot draft ahead; serve a network without states.")
    channel = Channel(verifier, group)
    # gloo cannot poll, and a receive that times out closes the connection. So a thread receives, up to CLOSE.
    arrived: SimpleQueue[tuple[Kind, Tensor] | Exception] = SimpleQueue()
    Thread(target=_receive_all, args=(channel, arrived), daemon=True).start()

    def begin(values: Tensor) -> DraftWorker:
        capacity, columns, vocabulary, do_sample = values[:4].tolist()
        rows = Rows(capacity, columns, torch.device(device))
        pipeline = LogitsPipeline.of_warpers(values[4:].view(torch.float64).tolist(), rows)
        return DraftWorker(drafter, DraftSession(rows, pipeline, bool(do_sample), None, False), vocabulary)

    def receive() -> tuple[Kind, Tensor]:
        while True:
            try:
                message = arrived.get(timeout=_LOOK_SECONDS)
            except Empty:
                look()
                continue
            if isinstance(message, Exception):
                raise _Lost from message
            return message

    def answer(result: Tensor | Exception) -> None:
        reply = (Kind.WINDOW, result) if isinstance(result, Tensor) else (Kind.FAILED, _text(result))
        try:
            channel.send(*reply, timeout)
        except RuntimeError as error:
            raise _Lost from error

    try:
        work(drafter, begin, receive, answer)
    except _Lost as lost:
        warnings.warn(f"nothing is drafted for rank {verifier} any more: {lost.__cause__}", stacklevel=2)
        with suppress(RuntimeError):
            channel.send(Kind.FAILED, _text(lost.__cause__), timeout)
        return False
    return True


class _Lost(Exception):
    """The verifier is gone, or its message is damaged; the cause is chained."""


def _receive_all(channel: Channel, arrived: "SimpleQueue[tuple[Kind, Tensor] | Exception]") -> None:
    kind = None
    try:
        while kind != Kind.CLOSE:
            kind, values = channel.receive(IDLE_SECONDS)
            arrived.put((kind, values))
    except Exception as error:
        arrived.put(error)


def _text(error: BaseException | None) -> Tensor:
    return torch.tensor([*f"{type(error).__name__}: {error}".encode()], dtype=torch.int64)


class DraftRanks:
    """Makes the last `drafting` ranks draft in rollouts, each for one of the first. All ranks must make this object.

    Args:
        drafting: number of ranks that draft.
        rank, ranks: this rank, and the number of ranks.
        timeout: most seconds of silence while a rank waits.

    Attributes:
        decoding: number of ranks that decode, the first ones.

    Raises:
        ValueError: there are fewer ranks that decode than ranks that draft.
    """

    def __init__(self, drafting: int, rank: int, ranks: int, timeout: float) -> None:
        if 2 * drafting > ranks:
            raise ValueError(
                f"specactor.draft_ranks={drafting} with {ranks} processes: each of them drafts for another rank, so "
                "at most "
                f"{ranks // 2} can."
            )
        self.decoding = ranks - drafting
        self._rank, self._other, self._group = rank, -1, None
        self._seconds = min(DRAFT_TIMEOUT, timeout)  # that a message may take
        for first in range(drafting):
            pair = [first, self.decoding + first]
            # gloo, since messages are in host memory. A separate group: if it fails, other groups stay usable.
            group = dist.new_group(pair, backend="gloo", timeout=timedelta(seconds=timeout))
            if rank in pair:
                self._other, self._group = sum(pair) - rank, group

    @property
    def drafts(self) -> bool:
        return self._rank >= self.decoding

    def serve(self, drafter: Drafter, device: torch.device, link: Link) -> None:
        """Drafts with `drafter` on `device` until the other rank leaves :meth:`ahead`. If the connection is lost, the
        other rank decodes without drafts, and this rank waits until the pool of `link` is done.

        Raises:
            RuntimeError: no decoding rank has written anything for the link's timeout.
        """
        watch = Watch(link)
        if not serve(drafter, self._other, device, self._group, self._seconds, watch.look):
            watch.await_end()

    @contextmanager
    def ahead(self, drafters: Sequence[Drafter]) -> Iterator[Sequence[Drafter]]:
        """Yields the drafters of a generation on this rank, or the drafter on the rank that drafts for it."""
        if self._group is None:
            yield drafters
            return
        (drafter,) = drafters
        pipe = DraftRank(self._other, self._group, self._seconds, drafter.strategy, drafter.max_rows, drafter.cost)
        try:
            yield [DecoupledDrafter(pipe)]
        finally:
            with suppress(RuntimeError):
                pipe.close()
