"""The drafters of a rollout. A drafter may fail in any way and changes no output: it is dropped."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from .drafter import Drafter


T = TypeVar("T")


class GuardedDrafters:
    """Runs actions on drafters, which go by their index, and drops those that raise.

    Args:
        drafters: of the rollout.
        dropped: is told the index of each drafter that fails.

    Attributes:
        names: their strategies.
        failure: why the newest one was dropped, or None.
    """

    def __init__(self, drafters: Sequence[Drafter], dropped: Callable[[int], None]) -> None:
        self._drafters: list[Drafter | None] = list(drafters)
        self._all = list(drafters)
        self._dropped = dropped
        self.names = [drafter.strategy for drafter in drafters]
        self.failure: str | None = None

    def __iter__(self) -> Iterator[Drafter]:
        """Those that have not failed."""
        return (drafter for drafter in self._drafters if drafter is not None)

    def has(self, which: int) -> bool:
        """Whether it has not failed."""
        return self._drafters[which] is not None

    def learns(self, which: int) -> bool:
        """Whether it has not failed, and wants to see the target's logits."""
        drafter = self._drafters[which]
        return drafter is not None and drafter.learns

    @property
    def stood(self) -> float:
        """Seconds in which decoding stood still because a drafter, also one that has failed, learned or was packed."""
        return sum(drafter.stood for drafter in self._all)

    def each(self, action: Callable[[Drafter], None]) -> None:
        """Runs `action` on each drafter."""
        for which in range(len(self._drafters)):
            self.ask(which, action)

    def ask(self, which: int, action: Callable[[Drafter], T]) -> T | None:
        """What `action` returns for a drafter; None where it failed, now or before."""
        drafter = self._drafters[which]
        if drafter is None:
            return None
        try:
            return action(drafter)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the drafter {type(drafter).__name__} failed and is not used for the rest of this generation, "
                f"which goes on without it and with the same tokens. {self.failure}",
                stacklevel=2,
            )
            self._drafters[which] = None
            self._dropped(which)
            with suppress(Exception):
                drafter.end()
            return None


def report_broken(_: Drafter) -> None:
    """Raises FloatingPointError for a drafter that has drawn from NaN."""
    raise FloatingPointError("the draft network returned NaN logits")
