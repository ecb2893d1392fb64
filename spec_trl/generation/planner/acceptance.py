"""Estimates acceptance as two rates: of a draft's first token and of its further tokens (`Drafts`).

One rate p for all positions, as in SA's ladder, fits networks and overrates lookups, whose passage is right or
wrong: 10 of 10 accepted in one round and none in the next are 6 tokens per round, but 10 of 11 judged positions
would say 7.1 at γ = 10. Two rates, 1/2 for the first token and 1 for the others, give τ = 6.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_DRAFT_LENGTH = 64  # tokens
FADE = 0.95  # decay: of a row's evidence per round, and of all evidence per rollout
FIRST_GUESS = 0.6, 2.0  # prior acceptance rate of a drafter, and its weight in draft positions
LIKENESS = 15.0  # weight, in draft positions: of a drafter's rate for a prompt, and of a prompt's rate for a row
MOST_PROMPTS = 4096  # most stored prompts, a few MB of JSON; the newest stay


@lru_cache(maxsize=1 << 14)  # planners use the same few values repeatedly
def expected_block_efficiency(acceptance: float, draft_length: int) -> float:
    """τ = (1 - α^(γ+1)) / (1 - α): tokens per block, bonus included, when draft tokens are accepted independently with
    probability α (Leviathan et al. 2023, Eq. 1)."""
    return sum(acceptance**k for k in range(draft_length + 1))


def acceptance_of(block_efficiency: float, draft_length: int) -> float:
    """α that explains `block_efficiency` at `draft_length`: the inverse of :func:`expected_block_efficiency`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_block_efficiency(middle, draft_length) < block_efficiency:
            low = middle
        else:
            high = middle
    return high


class Acceptance(NamedTuple):
    """Probabilities, 0 to 1, of accepting a chain's `first` token, and a `further` token after accepted ones."""

    first: float
    further: float

    @classmethod
    def geometric(cls, probability: float) -> "Acceptance":
        """The same rate for all positions (Leviathan et al. 2023; SA's p)."""
        return cls(probability, probability)

    def block_efficiency(self, draft_length: int) -> float:
        """τ of γ = `draft_length`: expected tokens of a round, bonus included."""
        return 1.0 + self.first * expected_block_efficiency(self.further, draft_length - 1)


class Drafts:
    """Acceptance by drafter, by drafter and prompt, and by drafter and row; each level is the prior of the next.

    Acceptance is two rates, so four counts: accepted first tokens, first tokens, accepted further tokens, further
    tokens. After a fully accepted `looked_up` draft the copied passage continues: the next first token is as likely as
    a further one, and counts as one.
    """

    def __init__(self, methods: Sequence[str], looked_up: Sequence[bool]) -> None:
        self.methods = list(methods)
        self._looked_up = np.array(looked_up, dtype=bool)  # [M]
        self._counts = np.zeros((len(methods), 4))
        self._prompts: dict[str, Floats] = {}  # [M, 4] each, oldest first
        self.begin([])

    def begin(self, prompts: Sequence[str]) -> None:
        """Starts a rollout of B requests with these prompts, P of them different."""
        place = {key: at for at, key in enumerate(dict.fromkeys(prompts))}
        self._keys = list(place)
        self._prompt_of = np.array([place[key] for key in prompts], dtype=np.int64)  # [B]
        self._of_prompts = np.zeros((len(place), len(self.methods), 4))  # [P, M, 4]
        for key in self._prompts.keys() & place.keys():
            self._of_prompts[place[key]] = self._prompts[key] * FADE
        self._of_rows = np.zeros((len(prompts), len(self.methods), 4))  # [B, M, 4]
        self._continues = np.zeros((len(prompts), len(self.methods)), dtype=bool)  # [B, M], last draft fully accepted

    def record(self, method: int, requests: Integers, accepted: Integers, attempted: Integers) -> None:
        """Adds the drafts of R rounds for `requests` `[n]`: `attempted` judged tokens and `accepted` ones, `[R, n]`
        each; -1: no draft."""
        drew, first = accepted >= 0, np.ones_like(accepted)  # [R, n]
        continues, whole = self._continues[requests, method], (0 < attempted) & (attempted == accepted)  # [n], [R, n]
        for row, drew_now, whole_now in zip(first, drew, whole, strict=True):
            row[:] = ~continues | ~self._looked_up[method]
            continues = np.where(drew_now, whole_now, continues)
        self._continues[requests, method] = continues
        right, tried = np.where(drew, accepted, 0), np.where(drew, attempted, 0)
        firsts = [np.minimum(right, first), np.minimum(tried, first)]
        counts = np.stack([*firsts, right - firsts[0], tried - firsts[1]], axis=-1)  # [R, n, 4]
        total = counts.sum(0)  # [n, 4]
        self._counts[method] += total.sum(0)
        np.add.at(self._of_prompts[:, method], self._prompt_of[requests], total)
        later = drew[::-1].cumsum(0)[::-1]  # [R, n], drafts from this one on
        faded = (FADE ** (later - drew)[..., None] * counts).sum(0)
        self._of_rows[requests, method] = FADE ** later[0][:, None] * self._of_rows[requests, method] + faded

    def end_rollout(self) -> None:
        """Decays counts: those of a method at every rollout, those of a prompt at every rollout with the prompt."""
        for key, counts in zip(self._keys, self._of_prompts, strict=True):
            self._prompts.pop(key, None)
            self._prompts[key] = counts  # at the end: the newest
        for key in list(self._prompts)[:-MOST_PROMPTS]:
            del self._prompts[key]
        self._counts *= FADE
        self.begin([])

    def survivals(self, requests: Integers, most: int) -> Floats:
        """`[B, M, most]`: probabilities that at least 1, 2, … tokens of a draft for `requests` `[B]` are accepted."""
        rates = _drawn(self._of_prompts[self._prompt_of[requests]], self._rates(), LIKENESS)  # [B, M, 2]
        rates = _drawn(self._of_rows[requests], rates, LIKENESS)
        continues = self._continues[requests] & self._looked_up  # [B, M]
        first = np.where(continues, rates[..., 1], rates[..., 0])
        return first[..., None] * rates[..., 1:] ** np.arange(most)

    def variances(self, most: int) -> Floats:
        """`[M, most]`: variance of log τ by method at γ = 1, 2, …, due to little evidence."""
        rates = self._rates()
        spread = np.sqrt(rates * (1 - rates) / (self._counts[:, 1::2] + FIRST_GUESS[1] + 1))  # [M, 2], sd of Beta
        higher = np.minimum(rates + spread, 1.0)
        first = np.stack([rates[:, 0], higher[:, 0], rates[:, 0]])  # [3, M]: expected, or one rate an sd higher
        further = np.stack([rates[:, 1], rates[:, 1], higher[:, 1]])
        tau = 1 + (first[..., None] * further[..., None] ** np.arange(most)).cumsum(-1)  # [3, M, most]
        return ((tau[1:] / tau[0] - 1) ** 2).sum(0)

    def _rates(self) -> Floats:  # [M, 2]
        return _drawn(self._counts, np.full((len(self.methods), 2), FIRST_GUESS[0]), FIRST_GUESS[1])

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint; JSON."""
        return {
            "methods": {name: counts.tolist() for name, counts in zip(self.methods, self._counts, strict=True)},
            "prompts": [
                [key, dict(zip(self.methods, counts.tolist(), strict=True))] for key, counts in self._prompts.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict` of methods that draft here. Earlier releases wrote 5 counts a prompt."""

        def counts_of(state: Mapping[str, Sequence[float]]) -> Floats:
            return np.array([state.get(name, [0.0] * 4)[-4:] for name in self.methods], dtype=float).reshape(-1, 4)

        self._counts = counts_of(state["methods"])
        self._prompts = {key: counts_of(counts) for key, counts in state["prompts"]}


def _drawn(counts: Floats, towards: Floats, weight: float) -> Floats:
    """Rates `[..., 2]` of `counts` `[..., 4]`, with the prior rates `towards` of a weight of `weight` positions."""
    return (counts[..., ::2] + weight * towards) / (counts[..., 1::2] + weight)
