"""Faults of other ranks, as a rank's link tells them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from spec_trl.distributed.link import Link


def test_a_rank_that_is_gone_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo raises where a transfer begins, if it knows by then."""

    def refuse(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    link = Link(dist.HashStore(), 0, 2, timeout=1)
    for action, name in ((link.send, "isend"), (link.receive, "irecv")):
        monkeypatch.setattr(dist, name, refuse)
        with pytest.raises(RuntimeError, match="rank 1, with which rows are exchanged, died or hangs.*closed by peer"):
            action(torch.zeros(1), 1)


def test_a_rank_that_never_comes_is_not_taken_for_the_store() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=0.5))
    link = Link(store, 0, 2, timeout=1)
    link.post(link.rows_of(0), "-1 0")
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 waits for another rank, which died or hangs.*rows/1"):
        link.await_note("work/1")
