"""Counts vLLM's draft tokens by its own counters, in this process or on a server."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


PREFIX = "vllm:spec_decode_num_"
_TOTALS = "drafts", "draft_tokens", "accepted_tokens"
_SAMPLE = re.compile(rf'^{PREFIX}(\w+?)_total{{(?:[^}}]*position="(\d+)"[^}}]*|[^}}]*)}} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Counts:
    """Drafts, draft tokens, accepted ones, and accepted ones by position in the draft."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    @classmethod
    def of_metrics(cls, metrics: Iterable[Any]) -> "Counts":
        """Of `LLM.get_metrics()`."""
        found = {each.name.removeprefix(PREFIX): each for each in metrics if each.name.startswith(PREFIX)}
        drafts, drafted, accepted = (getattr(found.get(name), "value", 0) for name in _TOTALS)
        return cls(drafts, drafted, accepted, tuple(getattr(found.get("accepted_tokens_per_pos"), "values", ())))

    @classmethod
    def of_text(cls, text: str) -> "Counts":
        """Of what a server answers at /metrics, in the form of Prometheus."""
        totals: dict[str, int] = {}
        by_position: dict[int, int] = {}
        for name, position, value in _SAMPLE.findall(text):  # of several engines each has its own line
            if position:
                by_position[int(position)] = by_position.get(int(position), 0) + int(float(value))
            else:
                totals[name] = totals.get(name, 0) + int(float(value))
        drafts, drafted, accepted = (totals.get(name, 0) for name in _TOTALS)
        return cls(drafts, drafted, accepted, tuple(by_position[at] for at in sorted(by_position)))

    def __add__(self, other: "Counts", sign: int = 1) -> "Counts":
        pairs = zip_longest(self.by_position, other.by_position, fillvalue=0)
        return Counts(
            self.drafts + sign * other.drafts,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            tuple(one + sign * two for one, two in pairs),
        )

    def __sub__(self, before: "Counts") -> "Counts":
        return self.__add__(before, -1)
