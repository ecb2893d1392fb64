"""Which method drafts first: acceptance as it was before, then the ladder (SA §4.2 "Initial selection", Fig. 10b)."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from .acceptance import Acceptance, AcceptanceCounts
from .ladder import NO_METHOD, BlockEfficiency, Choice, Ladder


VERSION = 2
"""Of what a checkpoint keeps."""
OPTIMISTIC = Acceptance.geometric(0.9)
"""Assumed of a method that never drafted: one that would not win with it is not worth a trial. A method's average
counts it as one more draft position. As a method that is not chosen loses its old evidence to decay, its average
climbs back to it, and so the method has another trial some day: drafters improve with training (ER App. D)."""
PROMPT_PRIOR = 20.0
"""Draft positions that the method's average counts for beside a prompt's own. A few dozen positions are what one short
completion brings, and a rate of so few is mostly chance. As the strength of a Beta prior, 20 says that prompts' rates
spread by about 0.1 around their method's: √(p (1 - p) / 21), an assumption."""


RECENT_PROMPTS = 64
"""Prompts from which to learn how much rows differ."""
MOST_ALIKE = 200.0
"""Draft positions that the average counts for at most beside a row's own: where rows seem to differ by chance."""
MOST_DELIVERED = 1.2
"""A rollout says at most so much in favour of the method that opened it: others may have come to help."""


@dataclass
class _PromptCounts:
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    rollout: int = 0  # of the newest record


class _Opened(NamedTuple):
    method: str
    batch: int
    until_last_row: bool  # what was expected


@dataclass
class _Delivered:
    rollouts: float = 0.0
    log_ratios: float = 0.0


@dataclass
class AcceptanceHistory:
    """Acceptance of each method, over rollouts, and of each method on each prompt that it drafted for; and how much of
    the speedup that follows from it was delivered.

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
    _methods: dict[str, AcceptanceCounts] = field(default_factory=dict, init=False, repr=False)
    _prompts: dict[str, dict[str, _PromptCounts]] = field(default_factory=dict, init=False, repr=False)  # oldest first
    _delivered: dict[_Opened, _Delivered] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} is out of range; it must be above 0 and at most 1.")
        if self.prompts < 1:
            raise ValueError(f"prompts={self.prompts} is out of range; it must be at least 1.")

    def record(self, method: str, prompt_key: str, counts: AcceptanceCounts) -> None:
        """`method` drafted for a row of the prompt called `prompt_key`, in one or several rounds."""
        if not counts.first:
            return
        self._methods.setdefault(method, AcceptanceCounts()).add(counts)
        prompt = self._prompts.pop(prompt_key, {})
        self._prompts[prompt_key] = prompt  # at the end: the newest
        own = prompt.setdefault(method, _PromptCounts())
        own.counts.add(counts, 1.0 if own.rollout == self._rollout else self.decay)
        own.rollout = self._rollout
        self._forget()

    def end_rollout(self) -> None:
        """What was recorded so far belongs to the past."""
        self._rollout += 1
        for counts in self._methods.values():
            counts.fade(self.decay)
        for delivered in self._delivered.values():
            delivered.rollouts *= self.decay
            delivered.log_ratios *= self.decay

    def record_delivery(self, method: str, batch: int, until_last_row: bool, measured: float, expected: float) -> None:
        """From when `method` began to draft for `batch` rows, none of them waiting, to the end of the rollout, it was
        `measured` times as fast as autoregressive decoding; its acceptance there let expect `expected`, over all
        rounds or until the last row."""
        delivered = self._delivered.setdefault(_Opened(method, batch, until_last_row), _Delivered())
        delivered.rollouts += 1
        # From a method that is expected to lose others take over, which is no credit to it.
        delivered.log_ratios += math.log(min(measured / max(expected, 1.0), MOST_DELIVERED))

    def delivered(self, method: str, batch: int, until_last_row: bool) -> float:
        """Share of an expected speedup that rollouts delivered, at most 1: their geometric mean, which goes back to 1
        where all of them are long past.

        It has what no mean acceptance tells: rows that the method leaves behind and nobody helps in time, rows whose
        acceptance ends half way, rounds of other sizes than those profiled."""
        found = self._delivered.get(_Opened(method, batch, until_last_row), _Delivered())
        return min(math.exp(found.log_ratios / max(found.rollouts, 1.0)), 1.0)

    def expected(self, method: str, prompt_keys: Sequence[str]) -> BlockEfficiency | None:
        """τ, by γ, to expect of `method` over all rounds of these prompts: the harmonic mean of theirs, since a row of
        little acceptance has more rounds. An empty batch, and a prompt that is new to the method, has the method's
        average. None: the method never drafted."""
        if method not in self._methods:
            return None
        rows = Counter(self.rates(method, key) for key in prompt_keys) or Counter([self.rates(method)])
        return lambda draft_length: (
            rows.total() / sum(count / rates.block_efficiency(draft_length) for rates, count in rows.items())
        )

    def knows(self, method: str, prompt_key: str) -> bool:
        """Whether `method` has drafted for the prompt."""
        return method in self._prompts.get(prompt_key, ())

    def rates_of_rows(self, method: str, prompt_keys: Sequence[str]) -> list[Acceptance]:
        """Each prompt's own rates, drawn towards the average as far as recent prompts were alike. Prompts that are new
        to the method are taken to differ as recent ones did; a single one has the average."""
        likeness = self._likeness(method)
        new = sum(not self.knows(method, key) for key in prompt_keys)
        recent = sorted(self.rates(method, key, likeness) for key in self._recent(method)) if new > 1 else []
        recent = recent or [self.rates(method)]
        spread = (recent[(2 * row + 1) * len(recent) // (2 * new)] for row in range(new))
        return [self.rates(method, key, likeness) if self.knows(method, key) else next(spread) for key in prompt_keys]

    def _likeness(self, method: str) -> float:
        """The strength, in draft positions, of the Beta prior that explains how much recent prompts differ: by chance
        alone, or in kind (the intraclass correlation, by a one-way analysis of variance). First positions tell it:
        those of one chain depend on each other."""
        counts = [self._prompts[key][method].counts for key in self._recent(method)]
        sizes = [own.first for own in counts]
        number, size = len(sizes), sum(sizes)
        if number < 2 or size <= number:
            return PROMPT_PRIOR
        shares = [own.first_accepted / own.first for own in counts]
        mean = sum(own.first_accepted for own in counts) / size
        between = sum(n * (share - mean) ** 2 for n, share in zip(sizes, shares, strict=True)) / (number - 1)
        within = sum(n * share * (1 - share) for n, share in zip(sizes, shares, strict=True)) / (size - number)
        usual = (size - sum(n * n for n in sizes) / size) / (number - 1)
        total = between + (usual - 1) * within
        correlation = (between - within) / total if total > 0 else 0.0
        return 1 / min(max(correlation, 1 / (1 + MOST_ALIKE)), 0.5) - 1

    def _recent(self, method: str) -> Iterator[str]:
        """Keys of those of the newest `RECENT_PROMPTS` prompts that the method drafted for."""
        newest = islice(reversed(self._prompts.items()), RECENT_PROMPTS)
        return (key for key, own in newest if method in own)

    def rates(self, method: str, prompt_key: str | None = None, prior: float = PROMPT_PRIOR) -> Acceptance:
        """A prompt's own rates, drawn towards the method's average as if by `prior` positions; without a prompt, that
        average. `OPTIMISTIC` where the method never drafted."""
        if method not in self._methods:
            return OPTIMISTIC
        average = self._methods[method].rates(OPTIMISTIC, 1.0)
        own = self._prompts.get(prompt_key, {}).get(method) if prompt_key is not None else None
        return average if own is None else own.counts.rates(average, prior)

    def _forget(self) -> None:
        while len(self._prompts) > self.prompts:
            del self._prompts[next(iter(self._prompts))]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON."""
        return {
            "version": VERSION,
            "rollout": self._rollout,
            "methods": {method: list(astuple(counts)) for method, counts in self._methods.items()},
            "prompts": [
                [key, {method: [own.rollout, *astuple(own.counts)] for method, own in prompt.items()}]
                for key, prompt in self._prompts.items()
            ],
            "delivered": [[*cell, *astuple(delivered)] for cell, delivered in self._delivered.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up where a checkpoint stopped, with as many of its newest prompts as are kept here; of another
        version it takes nothing, and warns."""
        if (version := state.get("version")) != VERSION:
            warnings.warn(
                f"the checkpoint's acceptance history has version={version} where this release reads {VERSION}; "
                "drafters are tried anew.",
                stacklevel=2,
            )
            return
        self._rollout = state["rollout"]
        self._methods = {method: AcceptanceCounts(*counts) for method, counts in state["methods"].items()}
        self._prompts = {
            key: {
                method: _PromptCounts(AcceptanceCounts(*counts), rollout)
                for method, (rollout, *counts) in prompt.items()
            }
            for key, prompt in state["prompts"]
        }
        self._delivered = {
            _Opened(method, batch, until_last_row): _Delivered(*delivered)
            for method, batch, until_last_row, *delivered in state["delivered"]
        }
        self._forget()


def counts_last_row(
    history: AcceptanceHistory, methods: Sequence[str], prompt_keys: Sequence[str], batch: int, races: bool
) -> bool:
    """Whether a rollout of these prompts, `batch` of them at a time, is judged by when its last row ends
    (`last_row.py`), and not by all its rounds.

    It is where all rows are in flight at once, unless others may help the rows that a method leaves behind: in
    `races`, or as the methods of prompts that several of them know.
    """
    may_choose = any(sum(history.knows(method, key) for method in methods) > 1 for key in set(prompt_keys))
    return len(prompt_keys) <= batch and not may_choose and not (races and len(methods) > 1)


def expectation(
    ladder: Ladder, history: AcceptanceHistory, method: str, prompt_keys: Sequence[str], until_last_row: bool
) -> BlockEfficiency | None:
    """τ, by γ, to expect of a method over all rounds of these prompts, or until the last row of them ends; None: it
    never drafted."""
    average = history.expected(method, prompt_keys)
    if average is None or not until_last_row:
        return average
    rows = history.rates_of_rows(method, prompt_keys) or [history.rates(method)]
    return lambda draft_length: ladder.until_last_row(
        method, [rates.block_efficiency(draft_length) for rates in rows], draft_length
    )


def select_method(
    ladder: Ladder,
    history: AcceptanceHistory,
    prompt_keys: Sequence[str],
    batch: int,
    methods: Sequence[str],
    races: bool = False,
) -> Choice:
    """The method for a whole batch: acceptance from `history`, speedup from `ladder` (①), the largest wins (②).

    A method that never drafted is ranked at `OPTIMISTIC` and, if it would win so, is returned for a trial. Each call
    does so until `record` has heard of the method, so there are at most as many trials as methods.

    Args:
        prompt_keys: of the batch's prompts, one per row.
        batch: rows to be decoded at a time.
        methods: those that can draft at this batch, all of them in `ladder`: one that could not would stay untried.
        races: whether rows may get chains of further methods.

    Returns:
        a method with its best γ; "none" where nothing promises more.

    Raises:
        ValueError: a method is not in `ladder`.
    """
    until_last_row = counts_last_row(history, methods, prompt_keys, batch, races)
    expected = {method: expectation(ladder, history, method, prompt_keys, until_last_row) for method in methods}
    shares = _shares(ladder, history, methods, prompt_keys, batch, until_last_row)
    best = _best(ladder, {method: own for method, own in expected.items() if own is not None}, batch, shares)
    untried = {method: OPTIMISTIC.block_efficiency for method, own in expected.items() if own is None}
    trial = _best(ladder, untried, batch, shares)
    return trial if trial.speedup > best.speedup else best


def _shares(
    ladder: Ladder,
    history: AcceptanceHistory,
    methods: Sequence[str],
    prompt_keys: Sequence[str],
    batch: int,
    until_last_row: bool,
) -> dict[str, float]:
    """Of each method's speedup what to expect, if none of the batch waits; else rounds count as they are."""
    if len(prompt_keys) > batch:
        return dict.fromkeys(methods, 1.0)
    profiled = ladder.profiled_batch(batch)
    return {method: history.delivered(method, profiled, until_last_row) for method in methods}


def _best(ladder: Ladder, expected: Mapping[str, BlockEfficiency], batch: int, shares: Mapping[str, float]) -> Choice:
    """The largest of the ladder's speedups after each method's share; of equals "none"."""
    choices = [
        replace(choice, speedup=choice.speedup * shares.get(choice.method, 1.0))
        for choice in ladder.rank(expected, batch)
    ]
    return max(choices, key=lambda choice: (choice.speedup, choice.method == NO_METHOD))


def select_per_prompt(
    ladder: Ladder,
    history: AcceptanceHistory,
    prompt_keys: Sequence[str],
    batch: int,
    methods: Sequence[str],
    margin: float = 0.05,
    races: bool = False,
) -> list[Choice]:
    """A method for each prompt, for rows of different methods in one batch.

    A prompt keeps the batch's choice unless its own best one is faster there by more than `margin`: each further
    method in use drafts in rounds of its own, and rows of different γ are all verified at the width of the widest.
    Only methods that have drafted for the prompt can be its own. Both speedups are the ladder's for the whole batch,
    at the prompt's own acceptance. During a trial every prompt takes part in it.

    Args:
        margin: at least 0.
        races: as of `select_method`.

    Returns:
        a choice per entry of `prompt_keys`, the speedup the prompt's own. Otherwise as `select_method`.
    """
    common = select_method(ladder, history, prompt_keys, batch, methods, races)
    if common.method != NO_METHOD and history.expected(common.method, ()) is None:
        return [common] * len(prompt_keys)
    until_last_row = counts_last_row(history, methods, prompt_keys, batch, races)
    shares = _shares(ladder, history, methods, prompt_keys, batch, until_last_row)
    # Beside the common method's: what it lacks, rows with methods of their own may lack as well.
    shares = {method: min(share / shares.get(common.method, 1.0), 1.0) for method, share in shares.items()}
    own = {key: _select_own(ladder, history, key, batch, shares, common, margin) for key in set(prompt_keys)}
    return [own[key] for key in prompt_keys]


def _select_own(
    ladder: Ladder,
    history: AcceptanceHistory,
    key: str,
    batch: int,
    shares: Mapping[str, float],
    common: Choice,
    margin: float,
) -> Choice:
    """The prompt's best choice, or else `common` with the speedup that it has there."""
    tried = {method: history.rates(method, key).block_efficiency for method in shares if history.knows(method, key)}
    best = _best(ladder, tried, batch, shares)
    speedup = 1.0
    if common.method != NO_METHOD:
        efficiency = history.rates(common.method, key).block_efficiency(common.draft_length)
        speedup = ladder.speedup(common.method, efficiency, batch, common.draft_length)
    if best.speedup > speedup * (1 + margin):
        return best
    return Choice(common.method, common.draft_length, speedup)
