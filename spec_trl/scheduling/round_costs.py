"""What a decoding round takes, predicted before any was measured: the sum of its forwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..efficient_rollout.roofline import Roofline
from ..specactor.ladder import Ladder


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


@dataclass(frozen=True)
class RooflineRounds:
    """Rounds by a calibrated roofline."""

    target: Roofline
    drafters: Mapping[str, Roofline]  # those of networks

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """As :data:`~.control.RoundSeconds`."""
        if not lengths:
            return self.target.target_seconds(batch, length)
        drafts = (
            count * self.drafters[name].draft_seconds(batch, length)
            for name, count in lengths.items()
            if name in self.drafters
        )
        return self.target.verify_seconds(batch, length, width) + sum(drafts)


@dataclass(frozen=True)
class LadderRounds:
    """Rounds by a profiled draft ladder (SA §4.2): what each drafter takes beyond an autoregressive round."""

    ladder: Ladder
    target: Roofline | None = None  # of autoregressive rounds, which it knows by length; None: by the ladder too

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """As :data:`~.control.RoundSeconds`."""
        found = [self.ladder.round_seconds(name, 1.0, batch, count) for name, count in lengths.items()]
        slowdown = 1 + sum(seconds / plain - 1 for seconds, plain in found)
        if self.target is not None:
            return self.target.target_seconds(batch, length) * slowdown
        return self.ladder.plain_seconds(batch) * slowdown
