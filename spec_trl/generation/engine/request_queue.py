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
        self.waiting = len(requests)

    def take(self, free: int, active: int) -> list[Request]:
        """At most `free` requests, to be decoded next to the `active` rows; none where none is active: it is over."""
        first = len(self.requests) - self.waiting
        taken = self.requests[first : first + free]
        self.waiting -= len(taken)
        return taken

    def keeps(self, index: int) -> bool:
        """Whether what request `index` has come to counts: a row has ended. Asked once."""
        return True

    def after_round(self, rollout: "Rollout") -> None:
        """A round is over and its ended rows have left: the queue may take further rows out of `rollout`."""
