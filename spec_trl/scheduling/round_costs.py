"""What a decoding round takes, predicted before any was measured: the sum of its forwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ForwardSeconds:
    """Seconds of one network's forward, by its tokens: straight lines between those that were timed, and beyond."""

    tokens: Sequence[int]  # ascending, two or more
    seconds: Sequence[float]

    def __call__(self, tokens: int) -> float:
        """Of a forward over `tokens` tokens, all rows together."""
        if tokens <= self.tokens[-1]:
            return float(np.interp(tokens, self.tokens, self.seconds))
        (before, last), (start, end) = self.tokens[-2:], self.seconds[-2:]
        return end + max(end - start, 0.0) / (last - before) * (tokens - last)

    def plus(self, seconds: float) -> "ForwardSeconds":
        """Of forwards that take `seconds` more."""
        return ForwardSeconds(self.tokens, [own + seconds for own in self.seconds])

    def times(self, share: float) -> "ForwardSeconds":
        """Of a network that takes `share` of this one's time."""
        return ForwardSeconds(self.tokens, [share * seconds for seconds in self.seconds])


@dataclass(frozen=True)
class ProbedRounds:
    """Rounds by forwards over short texts that were timed; what a round does between them is left out."""

    target: ForwardSeconds
    drafters: Mapping[str, ForwardSeconds]  # those of networks, per draft token; lookups take no time

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """As :data:`~.control.RoundSeconds`."""
        drafts = sum(count * self.drafters[name](batch) for name, count in lengths.items() if name in self.drafters)
        return self.target(batch * (1 + width)) + drafts
