"""One pool of requests for all ranks: a rank with free rows takes the next request of any rank. When no request is
left, a rank without rows gets rows of the rank that has most, or races for them with another drafter."""

import time
from collections.abc import Sequence

import numpy as np

from ..generation.engine.rollout import Rollout
from ..generation.engine.rows import Request, RequestQueue
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
        order: groups of request indices that are taken together, in the order of decoding; the same on every rank.
        rows: number of rows that a rank decodes at once, the same on every rank.
        link: to the other ranks.
        send_seconds: seconds to send a token's K/V, measured in earlier rollouts; None: nothing was sent so far.

    Attributes:
        send_seconds: the same, updated by what this rank received.
        idle_seconds: seconds in which this rank had nothing to decode.
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
        self._raced: set[int] = set()  # requests that another rank decodes at the same time
        self._copied: set[int] = set()  # those of them that came from another rank
        self._helpers: dict[tuple[int, str], int] = {}  # call of the rank that races for a request with a method
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
        ended = [f"ended/{index}" for index in self._raced]
        shared = ["taken", IDLE, "asked"] if self._link.rank == 0 else []
        self._link.erase([self._link.rows_of(self._link.rank), *numbered, *ended, *shared])

    # ---- a rank that has rows ---------------------------------------------------------------------------------------

    def keeps(self, index: int) -> bool:
        return index not in self._raced or self._link.claim(f"ended/{index}")

    def after_round(self, rollout: Rollout) -> None:
        self._rounds += 1
        started = time.perf_counter()
        if started < self._next_poll:
            return
        raced = [(row, index) for row, index in enumerate(rollout.rows.indices) if index in self._raced]
        lost = [row for row, index in raced if self._link.is_written(f"ended/{index}")]  # another rank ended it first
        if lost:
            rollout.drop(lost)
        calls = self._link.count("asked")
        self._open_calls += range(self._calls + 1, calls + 1)
        self._calls = calls
        if self._open_calls:  # a rank calls when no request is left to take
            self._left, self.waiting = 0, len(self._dealt)
        while True:
            rows = sum(index not in self._copied for index in rollout.rows.indices)  # not rows that it only races for
            self._post_rows(rows)
            if not self._open_calls or not self._has_most(rows):
                break
            begun = time.perf_counter()
            helped = self._help(rollout)
            started += time.perf_counter() - begun  # answering a call is not polling
            if not helped:
                break
        now = time.perf_counter()
        self._next_poll = now + min((now - started) / POLL_SHARE, self._link.timeout / 100)

    def _help(self, rollout: Rollout) -> bool:
        """Sends rows to the rank that has waited longest, or has it race for some; returns False if neither pays."""
        free = [row for row, index in enumerate(rollout.rows.indices) if index not in self._raced]
        lengths: list[int] = rollout.rows.host_lengths.tolist()
        free.sort(key=lengths.__getitem__)
        record, in_flight = rollout.record, rollout.rows
        step = step_seconds([(len(each.requests), each.tokens, each.seconds) for each in record.rounds[-NEWEST:]])
        per_prompt_token = record.phase_seconds().get("prefill", 0.0) / max(record.tokens_read, 1)
        costs = MoveCosts(min(per_prompt_token, step(1)), self.send_seconds)
        # Expects a row to generate as many tokens as it has: a good guess for long-tailed lengths.
        expected = float(np.minimum(in_flight.host_generated, in_flight.remaining).mean())
        count = rows_to_give([lengths[row] for row in free], expected, step, costs)
        rows, method = free[:count], None
        if not rows:
            assigned = rollout.control.further_method(list(rollout.rows.indices), self._helpers)
            if assigned is None:
                return False
            method, requests = assigned
            rows = [row for row, index in enumerate(rollout.rows.indices) if index in requests]
        number = self._open_calls.pop(0)
        if self._link.claim(f"helper/{number}"):
            self._link.count(IDLE, -1)
            (helper,) = self._link.read([f"asker/{number}"])
            moved = rollout.hand_over(sorted(rows), costs.head_share, method)
            if method is not None:
                self._raced.update(request.index for request in moved)
                self._helpers |= {(request.index, method): number for request in moved}
            self._sending.append(Sending(moved, self._link, int(helper), f"work/{number}"))
        return True

    def _post_rows(self, rows: int) -> None:
        """Publishes the number of this rank's rows, which also shows that the rank is alive."""
        self._link.post(self._link.rows_of(self._link.rank), f"{rows} {self._rounds}")

    def _has_most(self, rows: int) -> bool:
        """Whether no other rank has more rows; among equals the first rank."""
        notes = self._link.read_rows()
        if not all(notes):  # a rank that has not begun has all of its rows
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
        if self._arriving.is_race:
            self._copied.update(request.index for request in self._arriving.requests)
            self._raced |= self._copied
        else:
            self.taken_over += len(self._arriving.requests)
        return self._arriving.requests
