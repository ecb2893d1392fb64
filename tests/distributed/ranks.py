"""Ranks as threads, whose store is in memory and whose tensors go through queues, and as processes; and pools whose
ranks help each other for sure."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spec_trl.distributed.link import Link
from spec_trl.distributed.pool import SharedPool
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.generation.planner.control import Chain
from spec_trl.papers.specactor.rank_races import RacingPool
from tests.generation.races import Plans


ROOT = Path(__file__).parents[2]
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


def launch(command: list[str], ranks: int, seconds: float, who: int = -1) -> list[str]:
    """Runs `python -m` with `command`, in which {rank} stands for the rank, until all ranks but `who` have ended, or
    `seconds` are over; returns what they printed as errors."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as a launcher has it
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *(part.format(rank=rank) for part in command)], cwd=ROOT, stderr=subprocess.PIPE,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        return [
            process.communicate(timeout=seconds)[1].decode() for rank, process in enumerate(processes) if rank != who
        ]
    finally:
        for process in processes:
            process.kill()


class Patient(SharedPool):
    """The first rank's first round lasts until another rank has nothing left."""

    link: Link

    def after_round(self, rollout: Rollout) -> None:
        while self.link.rank == 0 and not self.link.count("asked"):
            time.sleep(0.001)
        super().after_round(rollout)


class PatientRacing(Patient, RacingPool):
    """The same of a pool whose ranks race."""


class Helped(Plans):
    """Drafts with the first drafter, and lets each free rank race for all rows with the second one, a lookup."""

    def __init__(self) -> None:
        super().__init__(2, [[Chain(0, 2)]])

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        wanted = [request for request in requests if (request, "ngram") not in helpers]
        return ("ngram", wanted) if wanted else None


def unfair(texts: list[list[int]]) -> list[int]:
    """An order by which the first of two ranks is dealt the longer half of the requests."""
    longest = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    half = len(texts) // 2
    pairs = list(zip(longest[:half], longest[half:], strict=True))
    return [index for place, pair in enumerate(pairs) for index in (pair if place % 2 == 0 else pair[::-1])]
