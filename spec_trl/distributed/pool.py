"""Shares one pool of requests: a rank with free rows takes the next request of any rank. When no request is left, a
rank without rows gets rows of the rank that has most."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..generation.engine.rollout import RequestQueue, Rollout
from ..generation.engine.rows import Request
from .link import IDLE, Link
from .moved_rows import MovedRows, Sending
from .shared_work import MoveCosts, dealt, rows_to_give, step_seconds


POLL_SHARE = 0.01
"""Share of a rank's time that it spends on polling the other ranks. It rises when the store is slow, so that others do
not assume that this rank is dead."""
NEWEST = 1024
"""Number of newest rounds whose mean time is used."""
_NOTHING = "nothing"


class SharedPool(RequestQueue):
    """One rank's view of the pool.

    Args:
        requests: of all ranks, the same list on every rank.
        order: groups of request indices to take together, in the order of decoding; the same on every rank.
        rows: number of rows that a rank decodes at once, the same on every rank.
        send_seconds: seconds to send a token's K/V, measured in earlier rollouts; None: unknown.

    Attributes:
        send_seconds: the same, with the rows received by this rank.
        idle_seconds: seconds that this rank had nothing to decode.
        taken_over: number of rows received from other ranks.
    """

    def __init__(
        self,
        requests: list[Request],
        order: Sequence[Sequence[int]],
        rows: int,
        link: Link,
        send_seconds: float | None,
    ) -> None:
        super().__init__(requests)
        self.send_seconds = send_seconds
        self.idle_seconds, self.taken_over = 0.0, 0
        self._link = link
        self._at_once = max(map(len, order), default=1)  # most requests that are taken at once
        rounds = rows // self._at_once
        self._dealt = self._requests_of(dealt(order, link.rank, link.ranks, rounds))
        self._undealt = order[rounds * link.ranks :]
        self._left = sum(map(len, self._undealt))
        self.waiting = len(self._dealt) + self._left
        self._rounds, self._next_poll = 0, 0.0
        self._numbers: list[int] = []  # numbers of this rank's calls for work
        self._calls = 0  # number of calls for work, of all ranks so far
        self._open_calls: list[int] = []  # calls that may be unanswered
        self._sending: list[Sending] = []
        self._arriving: MovedRows | None = None
        self._post_rows(len(self._dealt))

    def take(self, free: int, active: int) -> list[Request]:
        missing = -(-max(free - len(self._dealt), 0) // self._at_once)
        if missing and self._left:
            end = self._link.count("taken", missing)
            self._dealt += self._requests_of(self._undealt[end - missing : end])
            self._left = sum(map(len, self._undealt[end:]))
        taken, self._dealt = self._dealt[:free], self._dealt[free:]
        self.waiting = len(self._dealt) + self._left
        return taken if taken or active else self._call_for_work()

    def _requests_of(self, stacks: Sequence[Sequence[int]]) -> list[Request]:
        return [self.requests[index] for stack in stacks for index in stack]

    def forget(self) -> None:
        """Erases the notes of this rank; no rank may use the pool afterwards."""
        numbered = [f"{note}/{number}" for note in ("asker", "helper", "work") for number in self._numbers]
        shared = ["taken", IDLE, "asked"] if self._link.rank == 0 else []
        self._link.erase([self._link.rows_of(self._link.rank), *numbered, *shared])

    # ---- a rank that has rows ---------------------------------------------------------------------------------------

    def after_round(self, rollout: Rollout) -> None:
        self._rounds += 1
        started = time.perf_counter()
        if started < self._next_poll:
            return
        calls = self._link.count("asked")
        self._open_calls += range(self._calls + 1, calls + 1)
        self._calls = calls
        if self._open_calls:  # a rank calls when no request is left to take
            self._left, self.waiting = 0, len(self._dealt)
        while True:
            rows = self._count(rollout)
            self._post_rows(rows)
            if not self._open_calls or not self._has_most(rows):
                break
            called = time.perf_counter()
            helped = self._help(rollout)
            started += time.perf_counter() - called  # answering a call is not polling
            if not helped:
                break
        now = time.perf_counter()
        self._next_poll = now + min((now - started) / POLL_SHARE, self._link.timeout / 100)

    def _count(self, rollout: Rollout) -> int:
        return len(rollout.rows.indices)

    def _movable(self, rollout: Rollout) -> list[int]:
        return [*range(len(rollout.rows.indices))]

    def _help(self, rollout: Rollout) -> bool:
        """Sends rows to the rank that has waited longest; returns False if moving rows does not pay."""
        lengths: list[int] = rollout.rows.host_lengths.tolist()
        movable = sorted(self._movable(rollout), key=lengths.__getitem__)
        record, in_flight = rollout.record, rollout.rows
        step = step_seconds([(len(each.requests), each.tokens, each.seconds) for each in record.rounds[-NEWEST:]])
        per_prompt_token = record.phase_seconds().get("prefill", 0.0) / max(record.tokens_read, 1)
        costs = MoveCosts(min(per_prompt_token, step(1)), self.send_seconds)
        # Expects a row to generate as many tokens as it has: a good guess for long-tailed lengths.
        expected = float(np.minimum(in_flight.host_generated, in_flight.remaining).mean())
        rows = movable[: rows_to_give([lengths[row] for row in movable], expected, step, costs)]
        return self._send(rollout, rows, costs.head_share) if rows else self._help_otherwise(rollout, costs.head_share)

    def _help_otherwise(self, rollout: Rollout, head_share: float) -> bool:
        return False

    def _send(self, rollout: Rollout, rows: list[int], head_share: float, leaves: bool = True, **more: Any) -> bool:
        """Answers the oldest call with `rows`, moved or copied; `more`: entries of the note."""
        number = self._open_calls.pop(0)
        if self._link.claim(f"helper/{number}"):
            self._link.count(IDLE, -1)
            (helper,) = self._link.read([f"asker/{number}"])
            saved = rollout.save(sorted(rows), head_share)
            if leaves:
                rollout.drop(sorted(rows))
            self._sending.append(Sending(saved, self._link, int(helper), f"work/{number}", **more))
        return True

    def _post_rows(self, rows: int) -> None:
        """Publishes the number of this rank's rows, as a sign of life."""
        self._link.post(self._link.rows_of(self._link.rank), f"{rows} {self._rounds}")

    def _has_most(self, rows: int) -> bool:
        """Whether no other rank has more rows; among equals the first rank."""
        notes = self._link.read_rows()
        if not all(notes):  # a rank without a note has all of its rows
            return False
        others = [(-int(note.split()[0]), rank) for rank, note in enumerate(notes) if rank != self._link.rank]
        return rows > 0 and (-rows, self._link.rank) < min(others)

    # ---- a rank without rows ---------------------------------------------------------------------------------------

    def _call_for_work(self) -> list[Request]:
        """Waits for rows of another rank and returns them; an empty list: all ranks are done."""
        link, started = self._link, time.perf_counter()
        for sending in self._sending:
            sending.wait()
        if self._arriving is not None:
            self.send_seconds = self._arriving.send_seconds or self.send_seconds
        self._post_rows(-1)
        number = link.count("asked", 1)
        self._numbers.append(number)
        link.post(f"asker/{number}", str(link.rank))
        if link.count(IDLE, 1) == link.ranks:
            for other in range(1, link.count("asked") + 1):
                if link.claim(f"helper/{other}"):
                    link.post(f"work/{other}", _NOTHING)
        header = link.await_note(f"work/{number}")
        self.idle_seconds += time.perf_counter() - started
        if header == _NOTHING:
            return []
        self._post_rows(0)  # if that rank ends before its next round, other ranks wait for this one
        self._arriving = MovedRows(header, link, self.requests)
        return self._received(self._arriving)

    def _received(self, moved: MovedRows) -> list[Request]:
        self.taken_over += len(moved.requests)
        return moved.requests
