"""Ranks that only draft in a rollout, each for one that decodes (SA §4.1)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ..generation.drafters.decoupled.drafter import DecoupledDrafter
from ..generation.drafters.decoupled.thread import DRAFT_TIMEOUT
from ..generation.engine.drafter import Drafter
from .decoupled import DraftRank, serve
from .link import Link, Watch


class DraftRanks:
    """Who drafts for whom: the last `drafting` of all ranks, each for one of the first. All ranks must make it.

    Args:
        drafting: number of ranks that draft.
        rank, ranks: this rank, and how many there are.
        timeout: seconds after which a rank gives up that waits for others of which nothing is heard.

    Attributes:
        decoding: number of ranks that decode, the first ones.

    Raises:
        ValueError: there are fewer ranks that decode than ranks that draft.
    """

    def __init__(self, drafting: int, rank: int, ranks: int, timeout: float) -> None:
        if 2 * drafting > ranks:
            raise ValueError(
                f"draft_ranks={drafting} with {ranks} processes: each of them drafts for another rank, so at most "
                f"{ranks // 2} can."
            )
        self.decoding = ranks - drafting
        self._rank, self._other, self._group = rank, -1, None
        self._seconds = min(DRAFT_TIMEOUT, timeout)  # that a message may take
        for first in range(drafting):
            pair = [first, self.decoding + first]
            # Over gloo, since messages lie in host memory; one that fails leaves other groups whole.
            group = dist.new_group(pair, backend="gloo", timeout=timedelta(seconds=timeout))
            if rank in pair:
                self._other, self._group = sum(pair) - rank, group

    @property
    def drafts(self) -> bool:
        """Whether this rank drafts for another."""
        return self._rank >= self.decoding

    def serve(self, drafter: Drafter, device: torch.device, link: Link) -> None:
        """Drafts with `drafter` on `device` until the other rank leaves :meth:`ahead`. Where the connection to it is
        lost, which decodes on alone, waits for the end of the pool, whose `link` is given.

        Raises:
            RuntimeError: no rank that decodes has been heard of for the link's timeout.
        """
        watch = Watch(link)
        if not serve(drafter, self._other, device, self._group, self._seconds, watch.look):
            watch.await_end()

    @contextmanager
    def ahead(self, drafters: Sequence[Drafter]) -> Iterator[Sequence[Drafter]]:
        """The drafters of a generation on this rank: its own, or the one on the rank that drafts for it."""
        if self._group is None:
            yield drafters
            return
        (own,) = drafters
        link = DraftRank(self._other, self._group, self._seconds, own.strategy, own.max_rows, own.cost)
        try:
            yield [DecoupledDrafter(link)]
        finally:
            with suppress(RuntimeError):
                link.close()
