"""Which method drafts first: acceptance as it was before, then the ladder (SA §4.2 "Initial selection", Fig. 10b)."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from .acceptance import Acceptance, AcceptanceCounts
from .ladder import NO_METHOD, BlockEfficiency, Choice, Ladder


VERSION = 2  # of what a checkpoint keeps
OPTIMISTIC = Acceptance.geometric(0.9)
"""Acceptance assumed of a method that never drafted: one that would not win with it is not worth a trial.

A method's average counts it as one more draft position. The counts of a method that is not chosen fade, so its average
rises back to this, and it is tried again: drafters improve with training (ER App. D)."""
PROMPT_PRIOR = 20.0
"""Draft positions that the method's average counts for, next to a prompt's own. As the strength of a Beta prior, 20
assumes that prompts' rates spread by about 0.1: √(p (1 - p) / 21)."""
RECENT_PROMPTS = 64  # number of newest prompts that tell how much rows differ
MOST_ALIKE = 200.0  # most positions that the average counts for, where rows seem to differ by chance alone
MOST_DELIVERED = 1.2  # cap on a rollout's credit to its first drafter: other drafters may have helped


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
    """Acceptance of each method over rollouts, on average and on each prompt, and what share of the speedup that it
    predicts was delivered.

    Older rollouts fade: a method's counts with every rollout, a prompt's with every rollout that has the prompt again,
    since a prompt comes back once per epoch and acceptance hardly moves over a hundred steps (SA §6).

    Raises:
        ValueError: a value is out of range.
    """

    decay: float = 0.9  # weight of a rollout's counts one rollout later, above 0, at most 1
    prompts: int = 4096  # number of prompts kept; those that were not recorded for longest are forgotten first
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
        """Adds what `method` drafted for a row of the prompt `prompt_key`, in one or several rounds."""
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
        """Begins a new rollout: what was recorded so far fades."""
        self._rollout += 1
        for counts in self._methods.values():
            counts.fade(self.decay)
        for delivered in self._delivered.values():
            delivered.rollouts *= self.decay
            delivered.log_ratios *= self.decay

    def record_delivery(self, method: str, batch: int, until_last_row: bool, measured: float, expected: float) -> None:
        """Adds the speedup over plain decoding from when `method` began to draft for `batch` rows, while none waited,
        to the rollout's end: as `measured`, and as `expected` until the last row ended or over all rounds."""
        delivered = self._delivered.setdefault(_Opened(method, batch, until_last_row), _Delivered())
        delivered.rollouts += 1
        # Other methods take over from one that is expected to lose, which is no credit to it.
        delivered.log_ratios += math.log(min(measured / max(expected, 1.0), MOST_DELIVERED))

    def delivered(self, method: str, batch: int, until_last_row: bool) -> float:
        """Share of the expected speedup that rollouts delivered, at most 1: their geometric mean, which returns to 1
        as they fade. It tells what mean acceptance cannot: of rows that the method leaves behind, of acceptance that
        ends half way, of rounds of other sizes than those profiled."""
        found = self._delivered.get(_Opened(method, batch, until_last_row), _Delivered())
        return min(math.exp(found.log_ratios / max(found.rollouts, 1.0)), 1.0)

    def expected(self, method: str, prompt_keys: Sequence[str]) -> BlockEfficiency | None:
        """τ by γ that `method` lets expect over all rounds of these prompts: the harmonic mean of theirs, since a row
        of little acceptance has more rounds. New prompts and an empty batch have the method's average. None: it never
        drafted."""
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
        """Strength, in draft positions, of the Beta prior that explains how much recent prompts differ: by the
        intraclass correlation of first positions (one-way analysis of variance); further ones depend on each other."""
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
        """Of the newest `RECENT_PROMPTS` prompts, the keys of those that the method drafted for."""
        newest = islice(reversed(self._prompts.items()), RECENT_PROMPTS)
        return (key for key, own in newest if method in own)

    def rates(self, method: str, prompt_key: str | None = None, prior: float = PROMPT_PRIOR) -> Acceptance:
        """A prompt's own rates, drawn towards the method's average as if by `prior` positions; without a prompt the
        average; `OPTIMISTIC` where the method never drafted."""
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
        """Continues from a checkpoint, with as many of its newest prompts as are kept here; one of another version is
        left aside with a warning."""
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
    """Whether a rollout of these prompts, `batch` of them at a time, is judged by the end of its last row
    (`last_row.py`): all rows are in flight at once, and no other method may help those that one leaves behind, in
    `races` or because several methods know a prompt."""
    may_choose = any(sum(history.knows(method, key) for method in methods) > 1 for key in set(prompt_keys))
    return len(prompt_keys) <= batch and not may_choose and not (races and len(methods) > 1)


def expectation(
    ladder: Ladder, history: AcceptanceHistory, method: str, prompt_keys: Sequence[str], until_last_row: bool
) -> BlockEfficiency | None:
    """τ by γ that a method lets expect over all rounds of these prompts, or until the last row ends; None: it never
    drafted."""
    average = history.expected(method, prompt_keys)
    if average is None or not until_last_row:
        return average
    rows = history.rates_of_rows(method, prompt_keys) or [history.rates(method)]
    return lambda draft_length: ladder.until_last_row(
        method, [rates.block_efficiency(draft_length) for rates in rows], draft_length
    )


@dataclass(frozen=True)
class Selection:
    """Methods for a batch of prompts: acceptance from `history` (①), speedup from `ladder` (②), the largest wins.

    A method that never drafted is ranked at `OPTIMISTIC` and, if it wins so, chosen for a trial; `history`
    knows it afterwards. All methods raise ValueError if a method is not in `ladder`.
    """

    ladder: Ladder
    history: AcceptanceHistory
    prompt_keys: Sequence[str]  # of the batch's prompts, one per row
    batch: int  # rows decoded at a time
    methods: Sequence[str]  # those that can draft at this batch
    races: bool = False  # whether rows may get chains of further methods

    @cached_property
    def common(self) -> Choice:
        """The method for the whole batch with its best γ; "none" where no method promises more."""
        until_last_row = self._until_last_row
        expected = {
            method: expectation(self.ladder, self.history, method, self.prompt_keys, until_last_row)
            for method in self.methods
        }
        best = self._best({method: own for method, own in expected.items() if own}, self._shares)
        untried = {method: OPTIMISTIC.block_efficiency for method, own in expected.items() if not own}
        trial = self._best(untried, self._shares)
        return trial if trial.speedup > best.speedup else best

    def per_prompt(self, margin: float = 0.05) -> list[Choice]:
        """A method for each of `prompt_keys`, for rows of different methods in one batch.

        A prompt keeps the batch's choice unless another method, one that has drafted for the prompt, is faster on it
        by more than `margin` (at least 0): each further method costs drafting time, and all rows are verified at the
        width of the widest. During a trial all prompts take part in it. Speedups are the ladder's for the batch, at
        the prompt's own acceptance.
        """
        common, history = self.common, self.history
        if common.method != NO_METHOD and history.expected(common.method, ()) is None:
            return [common] * len(self.prompt_keys)
        # Relative to the common method: what it did not deliver, others may not deliver either.
        share = self._shares.get(common.method, 1.0)
        relative = {method: min(own / share, 1.0) for method, own in self._shares.items()}

        def select(key: str) -> Choice:
            known = (method for method in self.methods if history.knows(method, key))
            best = self._best({each: history.rates(each, key).block_efficiency for each in known}, relative)
            speedup = 1.0
            if common.method != NO_METHOD:
                efficiency = history.rates(common.method, key).block_efficiency(common.draft_length)
                speedup = self.ladder.speedup(common.method, efficiency, self.batch, common.draft_length)
            return best if best.speedup > speedup * (1 + margin) else replace(common, speedup=speedup)

        own = {key: select(key) for key in set(self.prompt_keys)}
        return [own[key] for key in self.prompt_keys]

    @cached_property
    def _until_last_row(self) -> bool:
        return counts_last_row(self.history, self.methods, self.prompt_keys, self.batch, self.races)

    @cached_property
    def _shares(self) -> dict[str, float]:
        """Share of its speedup that each method lets expect; 1 where a request waits, and rounds count as they are."""
        if len(self.prompt_keys) > self.batch:
            return dict.fromkeys(self.methods, 1.0)
        batch = self.ladder.profiled_batch(self.batch)
        return {method: self.history.delivered(method, batch, self._until_last_row) for method in self.methods}

    def _best(self, expected: Mapping[str, BlockEfficiency], shares: Mapping[str, float]) -> Choice:
        """The choice of largest speedup times the method's share; of equals "none"."""
        ranked = self.ladder.rank(expected, self.batch)
        choices = [replace(choice, speedup=choice.speedup * shares.get(choice.method, 1.0)) for choice in ranked]
        return max(choices, key=lambda choice: (choice.speedup, choice.method == NO_METHOD))
