"""Ranks as threads of one process: the store is in memory, and tensors go through queues."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spec_trl.distributed.link import Link


T = TypeVar("T")


class Done:
    """A transfer, which `wait` brings to its end."""

    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


class ThreadLink(Link):
    """The link of one thread to the others."""

    def __init__(self, rank: int, ranks: int, mail: dict[tuple[int, int], "queue.Queue[Tensor]"], *given: Any) -> None:
        super().__init__(*given, rank, ranks, timeout=20)
        self._mail = mail

    def send(self, tensor: Tensor, rank: int) -> Any:
        self._mail[self.rank, rank].put(tensor.clone())
        return Done(lambda: None)

    def receive(self, tensor: Tensor, rank: int) -> Any:
        def finish() -> None:
            sent = self._mail[rank, self.rank].get(timeout=20)
            assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(sent)

        return Done(finish)


def links(ranks: int) -> list[ThreadLink]:
    """A link for each of `ranks` threads."""
    mail: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
    store = dist.HashStore()
    return [ThreadLink(rank, ranks, mail, store) for rank in range(ranks)]


def run_ranks(ranks: int, job: Callable[[int], T]) -> list[T]:
    """What `job` returns on each rank; raises what any of them raises."""
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        barrier.wait()
        return job(rank)

    with ThreadPoolExecutor(ranks) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(ranks)]]
