"""Which method drafts first: acceptance as it was before, then the ladder (SA §4.2 "Initial selection", Fig. 10b)."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from .ladder import NO_METHOD, Choice, Ladder


OPTIMISTIC = 0.9
"""p assumed of a method that never drafted: one that would not win with it is not worth a trial. A method's average
counts it as one more draft position. As a method that is not chosen loses its old evidence to decay, its average
climbs back to it, and so the method has another trial some day: drafters improve with training (ER App. D)."""
PROMPT_PRIOR = 20.0
"""Draft positions that the method's average counts for beside a prompt's own. A few dozen positions are what one short
completion brings, and a rate of so few is mostly chance. As the strength of a Beta prior, 20 says that prompts' rates
spread by about 0.1 around their method's: √(p (1 - p) / 21), an assumption."""


@dataclass
class _Counts:
    accepted: float = 0.0
    attempted: float = 0.0
    rollout: int = 0  # of the newest record

    def add(self, accepted: int, attempted: int) -> None:
        self.accepted += accepted
        self.attempted += attempted

    def fade(self, decay: float) -> None:
        self.accepted *= decay
        self.attempted *= decay


@dataclass
class AcceptanceHistory:
    """Acceptance p of each method, over rollouts, and of each method on each prompt that it drafted for.

    Counts are summed, so that completions of one prompt weigh by their draft positions. Older rollouts fade: a
    method's counts with every rollout, a prompt's with every rollout that has the prompt again, since a prompt comes
    back once per epoch and acceptance hardly moves over a hundred steps (SA §6).

    Args:
        decay: what a rollout's counts weigh one rollout later, above 0, at most 1.
        prompts: how many prompts are kept; those not recorded for longest go first.

    Raises:
        ValueError: an argument is out of range.
    """

    decay: float = 0.9
    prompts: int = 4096
    _rollout: int = field(default=0, init=False, repr=False)
    _methods: dict[str, _Counts] = field(default_factory=dict, init=False, repr=False)
    _prompts: dict[str, dict[str, _Counts]] = field(default_factory=dict, init=False, repr=False)  # oldest first

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} is out of range; it must be above 0 and at most 1.")
        if self.prompts < 1:
            raise ValueError(f"prompts={self.prompts} is out of range; it must be at least 1.")

    def record(self, method: str, prompt_key: str, accepted: int, attempted: int) -> None:
        """`method` drafted for a row of the prompt called `prompt_key`.

        `attempted` counts the draft positions that had a verdict: those `accepted`, and in each round the first that
        was not, be it refused or left out by a drafter that had nothing to propose there. So a round of γ with a
        accepted tokens attempted min(a + 1, γ), with γ no more than the row had room for. accepted / attempted then
        estimates p of a geometric model. It overrates drafters whose tokens are accepted all or none, lookups above
        all: 10 of 10 in one round and none in the next are 6 tokens per round, and p = 10/11 says 7.1.

        Raises:
            ValueError: the counts are not 0 ≤ accepted ≤ attempted.
        """
        if not 0 <= accepted <= attempted:
            raise ValueError(f"accepted={accepted} of attempted={attempted} is out of range; it must be 0 to that.")
        if not attempted:
            return
        self._methods.setdefault(method, _Counts()).add(accepted, attempted)
        own = self._prompts.pop(prompt_key, {})
        self._prompts[prompt_key] = own  # at the end: the newest
        counts = own.setdefault(method, _Counts())
        if counts.rollout != self._rollout:
            counts.fade(self.decay)
            counts.rollout = self._rollout
        counts.add(accepted, attempted)
        self._forget()

    def end_rollout(self) -> None:
        """What was recorded so far belongs to the past."""
        self._rollout += 1
        for counts in self._methods.values():
            counts.fade(self.decay)

    def expected(self, method: str, prompt_keys: Sequence[str]) -> float | None:
        """p to expect of `method` on a batch of these prompts: the mean of their own rates, each drawn towards the
        method's average as if by `PROMPT_PRIOR` positions; a prompt that is new to the method has that average, and
        so has an empty batch. None: the method never drafted."""
        if method not in self._methods:
            return None
        total = self._methods[method]
        average = (total.accepted + OPTIMISTIC) / (total.attempted + 1)
        if not prompt_keys:
            return average
        return sum(self._rate(method, key, average) for key in prompt_keys) / len(prompt_keys)

    def _rate(self, method: str, prompt_key: str, average: float) -> float:
        counts = self._prompts.get(prompt_key, {}).get(method)
        if counts is None:
            return average
        return (counts.accepted + PROMPT_PRIOR * average) / (counts.attempted + PROMPT_PRIOR)

    def _forget(self) -> None:
        while len(self._prompts) > self.prompts:
            del self._prompts[next(iter(self._prompts))]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON."""
        return {
            "rollout": self._rollout,
            "methods": {method: list(astuple(counts)) for method, counts in self._methods.items()},
            "prompts": [
                [key, {method: list(astuple(counts)) for method, counts in own.items()}]
                for key, own in self._prompts.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where a checkpoint stopped, with as many of its newest prompts as are kept here."""
        self._rollout = state["rollout"]
        self._methods = {method: _Counts(*counts) for method, counts in state["methods"].items()}
        self._prompts = {
            key: {method: _Counts(*counts) for method, counts in own.items()} for key, own in state["prompts"]
        }
        self._forget()


def select_method(
    ladder: Ladder, history: AcceptanceHistory, prompt_keys: Sequence[str], batch: int, methods: Sequence[str]
) -> Choice:
    """The method for a whole batch: acceptance from `history`, speedup from `ladder` (①), the largest wins (②).

    A method that never drafted is ranked at `OPTIMISTIC` and, if it would win so, is returned for a trial. Each call
    does so until `record` has heard of the method, so there are at most as many trials as methods.

    Args:
        prompt_keys: of the batch's prompts, one per row.
        batch: rows to be decoded at a time.
        methods: those that can draft at this batch, all of them in `ladder`: one that could not would stay untried.

    Returns:
        a method with its best γ; "none" where nothing promises more.

    Raises:
        ValueError: a method is not in `ladder`.
    """
    rates = {method: history.expected(method, prompt_keys) for method in methods}
    best = ladder.rank({method: rate for method, rate in rates.items() if rate is not None}, batch)[0]
    trial = ladder.rank({method: OPTIMISTIC for method, rate in rates.items() if rate is None}, batch)[0]
    return trial if trial.speedup > best.speedup else best


def select_per_prompt(
    ladder: Ladder,
    history: AcceptanceHistory,
    prompt_keys: Sequence[str],
    batch: int,
    methods: Sequence[str],
    margin: float = 0.05,
) -> list[Choice]:
    """A method for each prompt, for rows of different methods in one batch.

    A prompt keeps the batch's choice unless its own best one is faster there by more than `margin`: each further
    method in use drafts in rounds of its own, and rows of different γ are all verified at the width of the widest.
    Both speedups are the ladder's for the whole batch, at the prompt's own acceptance. During a trial every prompt
    takes part in it.

    Args:
        margin: at least 0.

    Returns:
        a choice per entry of `prompt_keys`, the speedup the prompt's own. Otherwise as `select_method`.
    """
    common = select_method(ladder, history, prompt_keys, batch, methods)
    if common.method != NO_METHOD and history.expected(common.method, ()) is None:
        return [common] * len(prompt_keys)
    own = {key: _select_own(ladder, history, key, batch, methods, common, margin) for key in set(prompt_keys)}
    return [own[key] for key in prompt_keys]


def _select_own(
    ladder: Ladder,
    history: AcceptanceHistory,
    key: str,
    batch: int,
    methods: Sequence[str],
    common: Choice,
    margin: float,
) -> Choice:
    """The prompt's best choice, or else `common` with the speedup that it has there."""
    expected = {method: history.expected(method, [key]) for method in methods}
    rates = {method: rate for method, rate in expected.items() if rate is not None}
    best = ladder.rank(rates, batch)[0]
    speedup = 1.0
    if common.method != NO_METHOD:
        speedup = ladder.speedup(common.method, rates[common.method], batch, common.draft_length)
    if best.speedup > speedup * (1 + margin):
        return best
    return Choice(common.method, common.draft_length, speedup)
