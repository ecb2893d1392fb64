"""Rows that one rank sends to another: what arrives, in which order it is sent, and what is kept of it."""

import gc
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.distributed.link import Link
from spec_trl.distributed.moved_rows import MovedRows, Sending
from spec_trl.generation.engine.kv.base import RowKV
from spec_trl.generation.engine.rows import Request
from spec_trl.generation.engine.saved_row import TARGET, SavedRow
from tests.distributed.ranks import ThreadLink, links, run_ranks


NOTE = "work/1"


def states(columns: int, row: int) -> RowKV:
    """K/V of two layers whose numbers say where they belong; nothing for no columns, as a cache gives it."""

    def numbers(first: float, width: int) -> Tensor:
        return torch.arange(2 * columns * width).view(2, columns, width) + first

    first = 1e4 * row
    return {layer: (numbers(first + layer / 4, 3), numbers(first - layer / 4, 4)) for layer in range(2) if columns}


def requests(tails: Sequence[int]) -> list[Request]:
    """One for each of `tails`, which has so many columns to send after two that are to be computed again."""
    return [
        Request(
            row, torch.arange(2 + columns), 9, row,
            SavedRow(torch.tensor([row]), None, 2, {TARGET: (2 + columns, partial(states, columns, row))}),
        )
        for row, columns in enumerate(tails)
    ]  # fmt: skip


def tail(request: Request) -> RowKV:
    """K/V of the columns of `request` that were sent; it waits for them."""
    assert request.saved is not None
    return request.saved.kv[TARGET][1]() if TARGET in request.saved.kv else {}


def move(ends: Sequence[Link], tails: Sequence[int]) -> MovedRows:
    """What arrives on the second of two ranks."""

    def job(rank: int) -> Any:
        if rank == 0:
            return Sending(requests(tails), ends[0], 1, NOTE)
        return MovedRows(ends[1].await_note(NOTE), ends[1], requests(tails))

    for end in ends:
        end.post(end.rows_of(end.rank), "1 0")
    return run_ranks(2, job)[1]


@pytest.mark.parametrize("tails", [[3, 1], [0, 2, 0, 4], [2, 0], [0, 0]])
def test_each_row_gets_its_own_columns(tails: list[int]) -> None:
    """Of short rows all columns may be computed again, while of longer ones some are sent."""
    for place, request in enumerate(move(links(2), tails).requests):
        arrived = tail(request)
        for layer, expected in states(tails[place], place).items():
            assert all(torch.equal(mine, sent) for mine, sent in zip(arrived[layer], expected, strict=True))


class Meeting(ThreadLink):
    """As over NCCL, the first tensor from one rank to another waits until that one begins to receive."""

    met: "defaultdict[tuple[int, int], threading.Event]"

    def send(self, tensor: Tensor, rank: int) -> Any:
        assert self.met[self.rank, rank].wait(5), "the other rank does not receive"
        return super().send(tensor, rank)

    def receive(self, tensor: Tensor, rank: int) -> Any:
        self.met[rank, self.rank].set()
        return super().receive(tensor, rank)


def test_the_receiver_is_told_before_the_sender_waits_for_it() -> None:
    ends: list[Link] = []
    met: defaultdict[tuple[int, int], threading.Event] = defaultdict(threading.Event)
    for end in links(2):
        end.__class__ = Meeting
        end.met = met  # type: ignore[attr-defined]
        ends.append(end)
    assert len(move(ends, [1, 2]).requests) == 2


def test_states_are_kept_no_longer_than_they_are_needed() -> None:
    """A pool outlives its rollout; the K/V of rows that moved would lie next to the training step."""

    def big() -> set[int]:
        return {id(each) for each in gc.get_objects() if isinstance(each, Tensor) and each.numel() > 1000}

    before = big()  # of other tests
    moved = move(links(2), [300, 200])
    for request in moved.requests:
        assert tail(request)
    assert not big() - before
