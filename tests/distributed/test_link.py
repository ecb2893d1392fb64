"""Faults of other ranks, as a rank's link tells them."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spec_trl.distributed.link import IDLE, Link, Watch, naming_the_remedy


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
    with pytest.raises(
        RuntimeError, match=r"^rank 0 waits for the rollout of ranks \[1\], .* 1 s \(ddp_timeout\): one"
    ):
        link.await_note("work/1")


def test_what_another_rank_should_have_written_is_awaited_for_a_timeout() -> None:
    """Not for as long as the process group's own, which is another."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 waits for another rank, which died or hangs.*asker/1"):
        Link(store, 0, 2, timeout=0.2).read(["asker/1"])


def test_a_store_that_stops_is_not_waited_for_for_ever() -> None:
    """As rank 0 may, which holds it where no launcher does."""
    stopped = threading.Event()
    link = Link(SimpleNamespace(add=lambda *_: stopped.wait()), 1, 2, timeout=0.1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"rank 1 no longer reaches the store.*died or hangs.*0 s \(ddp_timeout\)"):
        link.count("taken", 1)
    stopped.set()


def test_a_transfer_is_awaited_for_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the process group's, which `ddp_timeout` does not set everywhere."""
    given = []
    monkeypatch.setattr(dist, "irecv", lambda *_: SimpleNamespace(wait=given.append))
    Link(dist.HashStore(), 0, 2, timeout=7).receive(torch.zeros(1), 1).wait()
    assert given == [timedelta(seconds=7)]


def test_a_rank_that_only_waits_hears_others_decode() -> None:
    """Ranks that draft wait for the end of a pool that they have no part in."""
    store, ranks = dist.HashStore(), 2
    waiting = Link(store, 2, ranks, timeout=0.4)
    decoding = [Link(store, rank, ranks, timeout=0.4) for rank in range(ranks)]
    for link in decoding:
        link.post(link.rows_of(link.rank), "1 0")

    def decode() -> None:
        for rounds in range(10):
            decoding[0].post("rows/0", f"1 {rounds}")
            over.wait(0.1)
        for link in decoding:
            link.count(IDLE, 1)

    over = threading.Event()
    thread = threading.Thread(target=decode)
    thread.start()
    Watch(waiting).await_end()  # longer than a timeout
    thread.join()
    decoding[0].count(IDLE, -1)
    decoding[1].post("rows/1", "-1 0")
    with pytest.raises(RuntimeError, match=r"^rank 2 waits for the rollout of ranks \[0\], .* died or hangs"):
        Watch(waiting).await_end()


@pytest.mark.parametrize(
    ("error", "is_named"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("gloo"), False),
    ],
)
def test_errors_of_collective_calls_say_what_to_do(error: Exception, is_named: bool) -> None:
    """At the innermost place that knows, and once."""
    with pytest.raises((RuntimeError, ValueError)) as caught, naming_the_remedy(0), naming_the_remedy(1):
        raise error
    if is_named:
        assert str(caught.value).startswith("rank 1 waits for the other ranks, and one of them died or hangs.")
        assert str(caught.value).count("resume from the last checkpoint") == 1 and caught.value.__cause__ is error
    else:
        assert caught.value is error
