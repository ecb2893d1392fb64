"""Races between ranks (SA §4.2): a rank without rows drafts for rows of another rank."""

import time
from typing import Any

from ...distributed.moved_rows import MovedRows
from ...distributed.pool import SharedPool
from ...generation.engine.rollout import Rollout
from ...generation.engine.rows import Request


class RacingPool(SharedPool):
    """A pool whose ranks race for rows where moving rows does not pay, if the control has a further drafter
    (:meth:`~.Planner.further_method`). A request's completion is of the rank that ends it first.

    Attributes:
        method: name of this rank's drafter in a race for all of its rows; None: it does not race.
    """

    method: str | None = None

    def __init__(self, *arguments: Any) -> None:
        self._raced: set[int] = set()  # requests that another rank decodes at the same time
        self._copied: set[int] = set()  # those of them that came from another rank
        self._helpers: dict[tuple[int, str], int] = {}  # call of the rank that races for a request with a method
        super().__init__(*arguments)

    def keeps(self, index: int) -> bool:
        return index not in self._raced or self._link.claim(f"ended/{index}")

    def forget(self) -> None:
        super().forget()
        self._link.erase([f"ended/{index}" for index in self._raced])

    def after_round(self, rollout: Rollout) -> None:
        if self._raced and time.perf_counter() >= self._next_poll:
            raced = [(row, index) for row, index in enumerate(rollout.rows.indices) if index in self._raced]
            if lost := [row for row, index in raced if self._link.is_written(f"ended/{index}")]:
                rollout.drop(lost)
        super().after_round(rollout)

    def _count(self, rollout: Rollout) -> int:
        return sum(index not in self._copied for index in rollout.rows.indices)  # not rows that it only races for

    def _movable(self, rollout: Rollout) -> list[int]:
        return [row for row, index in enumerate(rollout.rows.indices) if index not in self._raced]

    def _help_otherwise(self, rollout: Rollout, head_share: float) -> bool:
        further = getattr(rollout.control, "further_method", None)
        assigned = None if further is None else further(list(rollout.rows.indices), self._helpers)
        if assigned is None:
            return False
        method, requests = assigned
        rows = [row for row, index in enumerate(rollout.rows.indices) if index in requests]
        number, sent = self._open_calls[0], len(self._sending)
        self._send(rollout, rows, head_share, leaves=False, method=method)
        if len(self._sending) > sent:  # else another rank has answered the call
            self._raced.update(requests)
            self._helpers |= {(index, method): number for index in requests}
        return True

    def _received(self, moved: MovedRows) -> list[Request]:
        self.method = moved.note.get("method")
        if self.method is None:
            return super()._received(moved)
        self._copied.update(request.index for request in moved.requests)
        self._raced |= self._copied
        return moved.requests
