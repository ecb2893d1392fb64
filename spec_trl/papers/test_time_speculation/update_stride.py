"""Decides which rounds train the drafter: every S rounds (TTS App. C.1), or "adaptive" by gain.

The paper leaves an adaptive stride to future work (TTS App. C.2). Here an update runs if the rounds ahead are
expected to save its seconds, and if a budget covers them.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any


UPDATES = 1000
"""An update is expected to close 1 / UPDATES of the gap of log τ to its ceiling: between 1/600 (EAGLE-3, greedy) and
1/4000 (small LM, sampled) by `python -m benchmarks.tts drafters`. Over that many updates the share itself may double
or halve."""
TRIAL = 0.01
"""Share of the rounds' seconds that updates of unknown value may take. The planner's budget gets 1.5 times as much."""
FIRST = 2
"""Rounds that the first update is assumed to take, copying the network included; later updates are timed."""
NOISE = 0.1
"""Prior sd of the rise that one round shows."""
WEIGHT, RECENT = 4, 100
"""Weight of the prior in rounds, and the number of newest rounds in the mean square."""
WINDOW = 32
"""Rounds, and updates, in a median of seconds: one that compiled or waited must not count."""
TEXT = 256
"""Rounds in the mean of τ: texts differ more than an update changes."""
_SAVED = ("level", "share", "rounds", "_variances", "_noise", "_seen", "_efficiency", "_ceiling")


class FixedStride:
    """Lets the drafter learn every `rounds` (S) rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.begin()

    def begin(self) -> None:
        """Restarts: the first round is due."""
        self.waited = self.rounds - 1  # rounds since the last update; saved in checkpoints

    def is_due(self) -> bool:
        """Whether the drafter learns from this round; called once in every drafted round."""
        self.waited += 1
        if self.waited < self.rounds:
            return False
        self.waited = 0
        return True


class AdaptiveStride:
    """Lets the drafter learn after rounds where an update pays.

    A Kalman filter follows what is learned from update to update. Its state is the *level*, by how much learning has
    raised log τ, and the *share* of the gap log((γ + 1) / τ) that the next update closes. Every update measures the
    level: log τ of one round with the learned and with the first weights.

    * Value of an update: share · log((γ + 1) / τ) · rounds ahead · seconds of a round.
    * An update is due if its value exceeds its seconds and the budget covers them.
    * If the expected value exceeds the seconds, a round adds to the budget what learning saves (level less one sd). If
      the value plus one sd exceeds them, a round adds a small share of its seconds, if `spend`, which takes them from
      the control's exploration budget, agrees.

    So learning pays for itself, but for that share. It stops if the drafter cannot improve, gains nothing or loses.
    """

    def __init__(self) -> None:
        self.level, self.share = 0.0, 1 / UPDATES
        self._variances = 0.0, 0.0, self.share**2  # of the level, of both, of the share
        self._noise, self._seen = NOISE**2, WEIGHT
        self.rounds = 0
        self._efficiency, self._ceiling = 1.0, 1.0  # means of τ and γ + 1
        self._budget, self._charged = 0.0, 0.0
        self._of_rounds: deque[float] = deque(maxlen=WINDOW)
        self._of_updates: deque[float] = deque(maxlen=WINDOW)

    def observe(self, block_efficiency: float, draft_length: int, seconds: float) -> None:
        """Records a round with γ = `draft_length` that took `seconds` without learning and committed
        `block_efficiency` tokens per row, the corrected or bonus token included."""
        self.rounds += 1
        weight = 1 / min(self.rounds, TEXT)
        self._efficiency += weight * (block_efficiency - self._efficiency)
        self._ceiling += weight * (draft_length + 1 - self._ceiling)
        self._of_rounds.append(seconds)

    @property
    def tau(self) -> float:
        """Mean τ of the newest rounds."""
        return self._efficiency

    @property
    def is_harmful(self) -> bool:
        """Whether the drafter was better before it learned, by more than one sd."""
        return self.level + math.sqrt(self._variances[0]) < 0

    def is_due(self, rounds_ahead: float, spend: Callable[[float], bool]) -> bool:
        """Whether the drafter learns from this round; called once in every drafted round. `spend` takes seconds
        from the budget of trials, or refuses."""
        if not self._of_rounds:
            return False
        seconds = median(self._of_rounds)
        cost = median(self._of_updates) if self._of_updates else FIRST * seconds
        most = self._missing * rounds_ahead * seconds
        if most * (self.share + math.sqrt(self._variances[2])) < cost:
            return False
        if most * self.share >= cost:
            surely = self.level - math.sqrt(self._variances[0])
            self._budget += seconds * math.expm1(max(surely, 0.0))
        if self._budget < cost and spend(TRIAL * seconds):
            self._budget += TRIAL * seconds
        if self._budget < cost:
            return False
        self._budget, self._charged = 0.0, cost
        return True

    def learned(self, seconds: float, rise: float) -> None:
        """Records an update's `seconds`, and `rise` = log τ (learned weights) - log τ (first weights), measured on the
        update's round before it."""
        self._budget += self._charged - seconds
        self._charged = 0.0
        self._of_updates.append(seconds)
        if self._variances[0] > 0 and math.isfinite(rise):
            self._correct(rise)
        of_level, of_both, of_share = self._variances
        missing = self._missing
        self.level += missing * self.share
        self._variances = (
            of_level + 2 * missing * of_both + missing**2 * of_share,
            of_both + missing * of_share,
            of_share + 1 / UPDATES**3,
        )

    def forget(self) -> None:
        """Forgets the level: rows were reset."""
        self.level, self._variances = 0.0, (0.0, 0.0, self._variances[2])

    def state_dict(self) -> dict[str, Any]:
        """All but times of this machine, for a checkpoint."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores the result of :meth:`state_dict`; None: the level is unknown."""
        if state is None:
            self._variances = 1.0, 0.0, self._variances[2]  # sd: a factor of e
        else:
            vars(self).update({name: state[name] for name in _SAVED})

    @property
    def _missing(self) -> float:
        """log((γ + 1) / τ): how much log τ can still rise."""
        return max(math.log(self._ceiling / self._efficiency), 0.0)

    def _correct(self, rise: float) -> None:
        of_level, of_both, of_share = self._variances
        error = rise - self.level
        self._seen = min(self._seen + 1, RECENT)
        self._noise += (error**2 - self._noise) / self._seen
        total = of_level + self._noise
        self.level += of_level / total * error
        self.share += of_both / total * error
        self._variances = (
            of_level - of_level**2 / total,
            of_both - of_level * of_both / total,
            of_share - of_both**2 / total,
        )
