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
        """Returns up to `free` requests to start now, next to `active` rows. No request while `active` is 0 ends the
        rollout."""
        taken, self._own = self._own[:free], self._own[free:]
        self.waiting = len(self._own)
        return taken

    def put_back(self, requests: list[Request]) -> None:
        """Takes back `requests` that were taken, to be given out first; some have `progress` by now."""
        self._own = requests + self._own
        self.waiting += len(requests)

    def keeps(self, index: int) -> bool:
        """Called once when request `index` ends; False discards its completion: another rank ended it first."""
        return True

    def after_round(self, rollout: "Rollout") -> None:
        """Called after a round, when its ended rows have left; the queue may take further rows out of `rollout`."""
