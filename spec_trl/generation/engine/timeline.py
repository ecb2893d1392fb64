"""Who drafted when: for which request (SA Fig. 14), and for the batch; by the changes alone. Neither torch nor
transformers is needed to read it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...scheduling.control import Chain


MOST_CHANGES = 32
"""Of one request. Where there are more, two spells in a row, the shortest together, become one: that of the longer."""
MOST_PLANS = 128
"""Changes of the plan of a rollout, likewise: about as many as a figure of it can show."""


@dataclass
class RequestTimeline:
    """Who drafted for one request.

    Args:
        request: its row in the caller's batch.
        changes: (seconds since the start, decoding round counted from 0, names of those who draft from then on), at
            most `MOST_CHANGES`. The first is when the request got a row. Several names: they race; none: it decodes
            autoregressively.
        ended: seconds since the start.
    """

    request: int
    changes: list[tuple[float, int, list[str]]] = field(default_factory=list)
    ended: float = 0.0


class PlanChange(NamedTuple):
    """What rounds do from one of them on.

    Args:
        round: the first of them, counted from 0.
        draft_length: as of a `RoundPoint`; 0 is autoregressive decoding.
        rows: in flight. None: the log is older than this field.
        drafter: who drafts, several joined by "+". None: nobody, or the log is older than this field.
    """

    round: int
    draft_length: int
    rows: int | None = None
    drafter: str | None = None


def slowest(timelines: Sequence[RequestTimeline], count: int) -> list[RequestTimeline]:
    """The `count` requests that ended last, in the order of their ends."""
    return sorted(timelines, key=lambda timeline: timeline.ended)[-count:]


class TimelineLog:
    """Collects timelines of `requests` rows of the caller's batch, with the `names` of the drafters."""

    def __init__(self, requests: int, names: Sequence[str]) -> None:
        self.timelines = [RequestTimeline(request) for request in range(requests)]
        self._names = names
        self._chains: list[tuple[int, tuple[int, ...] | None]] = []
        self._requests: list[int] = []

    def record(self, seconds: float, round_: int, plan: Sequence[Chain], requests: Sequence[int]) -> None:
        """A round begins, of the chains of `plan` for the rows that hold `requests`."""
        chains = [(chain.which, chain.rows) for chain in plan]
        if chains == self._chains and requests == self._requests:  # most rounds cost no more than this
            return
        self._chains, self._requests = chains, list(requests)
        drafters: list[list[str]] = [[] for _ in requests]
        for which, rows in chains:
            for row in range(len(requests)) if rows is None else rows:
                if self._names[which] not in drafters[row]:
                    drafters[row].append(self._names[which])
        for request, own in zip(requests, drafters, strict=True):
            changes = self.timelines[request].changes
            if not changes or changes[-1][2] != own:
                changes.append((seconds, round_, own))
                thin(changes, MOST_CHANGES, 1)

    def end(self, requests: Sequence[int], seconds: float) -> None:
        """`requests` ended."""
        for request in requests:
            self.timelines[request].ended = seconds


def thin(changes: list[Any], most: int, when: int) -> None:
    """Makes one of two spells while there are more than `most` `changes`; the one that goes on is not among them. The
    field `when` of a change is its round; what was changed comes after it."""
    while len(changes) > most:
        at = min(range(1, len(changes) - 1), key=lambda at: changes[at + 1][when] - changes[at - 1][when])
        one, other, ended = changes[at - 1 : at + 2]
        longer = one if 2 * other[when] >= one[when] + ended[when] else other
        changes[at - 1 : at + 1] = [(*one[: when + 1], *longer[when + 1 :])]
        for place in (at, at - 1):
            if place and changes[place][when + 1 :] == changes[place - 1][when + 1 :]:
                del changes[place]
