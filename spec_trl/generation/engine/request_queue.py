"""Gives the requests of a batch to rows that are free."""

from typing import TYPE_CHECKING

from .rows import Request


if TYPE_CHECKING:
    from .rollout import Rollout


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
