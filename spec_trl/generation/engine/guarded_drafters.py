"""The drafters of a rollout: one that fails in any way changes no output, it is dropped; and lookup drafters that are
not in use are evaluated, by comparing their drafts with the committed text, without a forward."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ...scheduling.control import Control
from ...scheduling.planner import SHARE
from .accept import Integers, Proposal
from .drafter import Drafter
from .rows import Rows


T = TypeVar("T")


class GuardedDrafters:
    """Runs actions on drafters, which go by their index, and drops those that raise.

    Args:
        drafters: of the rollout.
        dropped: is told the index of each drafter that fails.

    Attributes:
        names: their strategies.
        failure: why the newest one was dropped, or None.
    """

    def __init__(self, drafters: Sequence[Drafter], dropped: Callable[[int], None]) -> None:
        self._drafters: list[Drafter | None] = list(drafters)
        self._all = list(drafters)
        self._dropped = dropped
        self.names = [drafter.strategy for drafter in drafters]
        self.failure: str | None = None

    def __iter__(self) -> Iterator[Drafter]:
        """Those that have not failed."""
        return (drafter for drafter in self._drafters if drafter is not None)

    def has(self, which: int) -> bool:
        """Whether it has not failed."""
        return self._drafters[which] is not None

    def learns(self, which: int) -> bool:
        """Whether it has not failed, and wants to see the target's logits."""
        drafter = self._drafters[which]
        return drafter is not None and drafter.learns

    @property
    def stood(self) -> float:
        """Seconds in which decoding stood still because a drafter, also one that has failed, learned or was packed."""
        return sum(drafter.stood for drafter in self._all)

    def each(self, action: Callable[[Drafter], None]) -> None:
        """Runs `action` on each drafter."""
        for which in range(len(self._drafters)):
            self.ask(which, action)

    def ask(self, which: int, action: Callable[[Drafter], T]) -> T | None:
        """What `action` returns for a drafter; None where it failed, now or before."""
        drafter = self._drafters[which]
        if drafter is None:
            return None
        try:
            return action(drafter)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the drafter {type(drafter).__name__} failed and is not used for the rest of this generation, "
                f"which goes on without it and with the same tokens. {self.failure}",
                stacklevel=2,
            )
            self._drafters[which] = None
            self._dropped(which)
            with suppress(Exception):
                drafter.end()
            return None


def report_broken(_: Drafter) -> None:
    """Raises FloatingPointError for a drafter that has drawn from NaN."""
    raise FloatingPointError("the draft network returned NaN logits")


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
        self._lookups = {which: _Lookup() for which in control.listens_to}

    def before(self, drafting: Mapping[int, object]) -> None:
        """A round begins, in which `drafting` do so: where nothing is pending, other lookups draft."""
        for which, lookup in self._lookups.items():
            if which in drafting:
                lookup.pending.clear()  # its verdicts are told by the round
            elif not lookup.rests() and lookup.pending.keys().isdisjoint(self._rows.indices):
                lookup.rounds, lookup.since, lookup.seconds = self._control.most_listened, time.perf_counter(), 0.0
                with lookup.working():
                    lookup.pending = self._drafters.ask(which, self._drafts) or {}

    def _drafts(self, drafter: Drafter) -> dict[int, tuple[Integers, int]]:
        length, indices = self._control.most_listened, self._rows.indices
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
        told, most = [], self._control.most_listened
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
            self._control.overheard(which, *zip(*told, strict=True))
