"""Gives the requests of a batch to rows that are free."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .rows import Request


if TYPE_CHECKING:
    from .rollout import Rollout


PATIENCE = 0.25
"""Rounds that empty rows may cost until more are free: each costs a round over the number of all rows. A forward over
several short prompts takes little longer than over one, and a wait that saves nothing has cost no more than this. Of
the values simulated (benchmarks/admission.py) the largest that lengthens no case by more than 0.2 %."""


class Patience:
    """Decides when free rows are given to waiting requests: when several can be, whose prompts are then read at once.

    Args:
        prompt_keys: of all requests, by index; equal for equal prompts.
        capacity: number of all rows.
    """

    def __init__(self, prompt_keys: Sequence[str], capacity: int) -> None:
        self._keys, self._capacity = prompt_keys, capacity
        self._empty = 0  # rows times rounds that were empty since the last admission

    def waits(self, free: int, in_flight: Sequence[int], upcoming: Request | None) -> bool:
        """Whether `free` rows stay empty for another round. They never do where no request is `in_flight`, nor for a
        prompt that is: it is not read again."""
        shares = upcoming is not None and self._keys[upcoming.index] in {self._keys[index] for index in in_flight}
        self._empty += free
        if in_flight and not shares and self._empty < PATIENCE * self._capacity:
            return True
        self._empty = 0
        return False


class RequestQueue:
    """Gives `requests` out in their order. `distributed/pool.py` has a queue that several ranks share.

    Attributes:
        requests: all of the batch, by index.
        waiting: number of those that nobody decodes yet, as far as is known.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self._own = list(requests)
        self.waiting = len(requests)

    @property
    def upcoming(self) -> Request | None:
        """The request that is given out next, where that is known."""
        return self._own[0] if self._own else None

    def take(self, free: int, active: int) -> list[Request]:
        """At most `free` requests, to be decoded next to the `active` rows; none where none is active: it is over."""
        taken, self._own = self._own[:free], self._own[free:]
        self.waiting = len(self._own)
        return taken

    def put_back(self, requests: list[Request]) -> None:
        """Takes back `requests` that were taken, to be given out first; some have `progress` by now."""
        self._own = requests + self._own
        self.waiting += len(requests)

    def keeps(self, index: int) -> bool:
        """Whether what request `index` has come to counts: a row has ended. Asked once."""
        return True

    def after_round(self, rollout: "Rollout") -> None:
        """A round is over and its ended rows have left: the queue may take further rows out of `rollout`."""
