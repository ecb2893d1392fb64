"""Estimates the acceptance of lookup drafters that are not in use, by comparing their drafts with the committed text.
This needs no forward."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...scheduling.control import Control
from ...scheduling.planner import SHARE
from .drafter import Drafter
from .guarded_drafters import GuardedDrafters
from .outcome import Integers
from .rows import Rows
from .verification import Proposal


_END = -1  # no token: the draft has ended before it


@dataclass
class _Lookup:
    """A lookup drafter that is being evaluated."""

    pending: dict[int, tuple[Integers, int]] = field(default_factory=dict)  # by request: draft, how far it was right
    rounds: int = 0  # left until it is evaluated again
    since: float = 0.0  # when it was last evaluated
    seconds: float = 0.0  # that evaluating has taken since

    @contextmanager
    def working(self) -> Iterator[None]:
        """Adds the time spent inside to `seconds`."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def rests(self) -> bool:
        """Whether it drafted a few rounds ago, or has taken more than its share of the time that has passed."""
        self.rounds -= 1
        return self.rounds >= 0 or time.perf_counter() - self.since < self.seconds / SHARE


class Overheard:
    """Has the lookups that the control listens to draft beside a round now and then, and tells it how far the text
    that follows agrees. No forward is run, and no token depends on it. Lookups take :data:`~.planner.SHARE` of the
    time each: they rest meanwhile."""

    def __init__(self, control: Control, drafters: GuardedDrafters, rows: Rows, vocabulary: int) -> None:
        self._control, self._drafters, self._rows, self._vocabulary = control, drafters, rows, vocabulary
        self._lookups = {which: _Lookup() for which in control.compared_lookups}

    def before(self, drafting: Mapping[int, object]) -> None:
        """A round begins, in which `drafting` do so: where nothing is pending, other lookups draft."""
        for which, lookup in self._lookups.items():
            if which in drafting:
                lookup.pending.clear()  # its verdicts are told by the round
            elif not lookup.rests() and lookup.pending.keys().isdisjoint(self._rows.indices):
                lookup.rounds, lookup.since, lookup.seconds = self._control.compared_length, time.perf_counter(), 0.0
                with lookup.working():
                    lookup.pending = self._drafters.ask(which, self._drafts) or {}

    def _drafts(self, drafter: Drafter) -> dict[int, tuple[Integers, int]]:
        length, indices = self._control.compared_length, self._rows.indices
        proposal: Proposal = drafter.propose(length, None).checked(len(indices), length, self._vocabulary)
        steps = torch.arange(length, device=proposal.tokens.device)  # [γ]
        drafts = proposal.tokens.masked_fill(steps >= proposal.drafted()[:, None], _END)  # [B, γ]
        told = drafts.to("cpu", non_blocking=True).numpy()  # filled when the round has waited for the device
        return {request: (draft, 0) for request, draft in zip(indices, told, strict=True)}

    def after(self, requests: Sequence[int], tokens: Integers, kept: Integers) -> None:
        """A round has committed the first `kept` `[B]` of `tokens` `[B, γ + 1]`."""
        for which, lookup in self._lookups.items():
            if lookup.pending:
                with lookup.working():
                    self._compare(which, lookup.pending, requests, tokens, kept)

    def _compare(
        self,
        which: int,
        pending: dict[int, tuple[Integers, int]],
        requests: Sequence[int],
        tokens: Integers,
        kept: Integers,
    ) -> None:
        told, most = [], self._control.compared_length
        for request, text, count in zip(requests, tokens.tolist(), kept.tolist(), strict=True):
            if request not in pending:
                continue
            draft, right = pending[request]
            for token in text[:count]:
                if right == len(draft) or draft[right] != token:
                    told.append((request, right, min(right + 1, most)))
                    del pending[request]
                    break
                right += 1
            else:
                pending[request] = draft, right
        if told:
            self._control.record_unverified(which, *zip(*told, strict=True))
