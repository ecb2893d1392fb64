"""Drops failing drafters, without a change of the output, and evaluates idle lookup drafters. A failing drafter is
dropped, and changes no output. Lookup drafters that do not draft are evaluated: their guesses are compared with the
committed text, without a forward."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..planner.control import Control
from ..planner.planner import SHARE
from .drafter import Drafter
from .forwards.runner import EagerRunner
from .rows import Integers, Rows


T = TypeVar("T")


class GuardedDrafters:
    """Runs actions on drafters, by index, and drops those that raise.

    Args:
        dropped: called with the index of a drafter that fails.

    Attributes:
        in_use: drafters that have not failed.
        names: strategies of all drafters.
        failure: why the last drafter was dropped, or None.
    """

    def __init__(self, drafters: Sequence[Drafter], dropped: Callable[[int], None]) -> None:
        self.in_use = dict(enumerate(drafters))
        self.names = list(map(attrgetter("strategy"), drafters))
        self.failure: str | None = None
        self._all, self._dropped = drafters, dropped

    @property
    def waited(self) -> float:
        """Seconds that decoding waited for learning or packing, of failed drafters too."""
        return sum(map(attrgetter("waited"), self._all))

    def ask_all(self, action: Callable[[Drafter], None]) -> None:
        for index in list(self.in_use):
            self.ask(index, action)

    def ask(self, index: int, action: Callable[[Drafter], T]) -> T | None:
        """Returns the result of `action` for a drafter; None if it failed, now or before."""
        drafter = self.in_use.get(index)
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
            del self.in_use[index]
            self._dropped(index)
            with suppress(Exception):
                drafter.end()
            return None


def report_broken(_: Drafter) -> None:
    """Raises FloatingPointError for a drafter that has drawn from NaN."""
    raise FloatingPointError("the draft network returned NaN logits")


_END = -1  # no token: the draft ends before it


@dataclass
class _Lookup:
    pending: dict[int, tuple[Integers, int]] = field(default_factory=dict)  # by request: draft, number of right tokens
    rounds: int = 0  # left until it is evaluated again
    since: float = 0.0  # when it was last evaluated
    seconds: float = 0.0  # seconds of evaluating since then


class LookupEvaluation:
    """Estimates the acceptance of lookup drafters that do not draft: those named by the control sometimes draft beside
    a round, and the control records how far the committed text agrees. No forward runs, and no token depends on it. A
    lookup takes at most :data:`~.SHARE` of the time, and then pauses."""

    def __init__(self, control: Control, drafters: GuardedDrafters, vocabulary: int) -> None:
        self._control, self._drafters, self._vocabulary = control, drafters, vocabulary
        self._lookups = {index: _Lookup() for index in control.compared_lookups}

    def before_round(self, drafting: Mapping[int, object], requests: Sequence[int]) -> None:
        """Makes idle lookups draft for `requests`, the request in each row (-1: ended), if all their earlier drafts
        are compared; `drafting`: drafters of the round."""
        for index, lookup in self._lookups.items():
            if index in drafting:
                lookup.pending.clear()  # the round shows its acceptance
                continue
            lookup.rounds -= 1
            started = time.perf_counter()
            rests = lookup.rounds >= 0 or started - lookup.since < lookup.seconds / SHARE
            if not rests and lookup.pending.keys().isdisjoint(requests):
                lookup.pending = self._drafters.ask(index, partial(self._drafts, requests)) or {}
                lookup.rounds, lookup.since = self._control.compared_length, started
                lookup.seconds = time.perf_counter() - started

    def _drafts(self, requests: Sequence[int], drafter: Drafter) -> dict[int, tuple[Integers, int]]:
        length = self._control.compared_length
        proposal = drafter.propose(length, None).checked(len(requests), length, self._vocabulary)
        steps = torch.arange(length, device=proposal.tokens.device)  # [γ]
        drafts = proposal.tokens.masked_fill(steps >= proposal.drafted()[:, None], _END)  # [B, γ]
        on_host = drafts.to("cpu", non_blocking=True).numpy()  # valid after the round has waited for the device
        return {request: (draft, 0) for request, draft in zip(requests, on_host, strict=True) if request >= 0}

    def after_round(self, requests: Sequence[int], tokens: Integers, counts: Integers) -> None:
        """Compares drafts with the first `counts` `[B]` of `tokens` `[B, γ + 1]`, the committed ones."""
        for index, lookup in self._lookups.items():
            if lookup.pending:
                started = time.perf_counter()
                self._compare(index, lookup.pending, requests, tokens, counts)
                lookup.seconds += time.perf_counter() - started

    def _compare(
        self,
        index: int,
        pending: dict[int, tuple[Integers, int]],
        requests: Sequence[int],
        tokens: Integers,
        counts: Integers,
    ) -> None:
        ended, most = [], self._control.compared_length
        for request, text, count in zip(requests, tokens.tolist(), counts.tolist(), strict=True):
            if request not in pending:
                continue
            draft, right = pending[request]
            for token in text[:count]:
                if right == len(draft) or draft[right] != token:
                    ended.append((request, right, min(right + 1, most)))
                    del pending[request]
                    break
                right += 1
            else:
                pending[request] = draft, right
        if ended:
            self._control.record_unverified(index, *zip(*ended, strict=True))


def broken_logits(
    target: EagerRunner, rows: Rows, sound: Integers, counts: Integers, draft_length: int, rounds: int
) -> FloatingPointError:
    """Makes the error for rows without a token to draw: fewer of their tokens are `sound` (`[B]`) than the `counts`
    (`[B]`) to commit. Repeats the forward of `draft_length` draft tokens, to name the first module with NaN or
    infinity."""
    row, count = int((sound < counts).argmax()), draft_length + 1
    # The verified tokens are the row's drafts up to the position.
    tokens, columns = rows.window(-1, count), rows.columns_after(-1, count)  # [B, γ + 1] each
    where = _first_broken_module(target, tokens, columns, rows.longest + draft_length)
    return FloatingPointError(
        f"the target's logits leave no token to sample (NaN, or -inf everywhere) for request "
        f"{rows.indices[row]} at generated position {rows.host_generated[row] + sound[row]}, after "
        f"{rounds} decoding rounds; {where}. Check the weights of the last optimizer step and the logits processors, "
        "or run this model in a wider dtype."
    )


def _first_broken_module(target: EagerRunner, tokens: Tensor, positions: Tensor, columns: int) -> str:
    """Repeats a forward; returns a sentence that names the first module with a NaN or infinity in its output."""
    broken, network = list[str](), target.network

    def watch(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if not broken and isinstance(output, Tensor) and not torch.isfinite(output).all():
            broken.append(f"the first non-finite values come out of '{name}' ({output.dtype})")

    leaves = [(name, module) for name, module in network.named_modules() if not module._modules]
    handles = [module.register_forward_hook(partial(watch, name)) for name, module in leaves]
    try:
        EagerRunner(network, target.cache).forward(tokens, positions, columns)  # a replay calls no hooks
    finally:
        for handle in handles:
            handle.remove()
    sound = f"every module's output is finite ({network.dtype}): the logits processors did it"
    return broken[0] if broken else sound
