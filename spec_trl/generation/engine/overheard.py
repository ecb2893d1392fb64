"""What lookups would have drafted while others did: their drafts are compared with the text for nothing."""

from collections.abc import Mapping, Sequence

from ...scheduling.control import Control
from .drafter import Drafter
from .guarded_drafters import GuardedDrafters
from .outcome import Integers
from .rows import Rows
from .verification import Proposal


class Overheard:
    """Has the lookups that the control listens to draft beside a round now and then, and tells it how far the text
    that follows agrees. No forward is run, and no token depends on it."""

    def __init__(self, control: Control, drafters: GuardedDrafters, rows: Rows, vocabulary: int) -> None:
        self._control, self._drafters, self._rows, self._vocabulary = control, drafters, rows, vocabulary
        self._pending: dict[int, dict[int, list[int]]] = {which: {} for which in control.listens_to}  # by request
        self._rest = dict.fromkeys(control.listens_to, 0)
        self._right: dict[tuple[int, int], int] = {}  # drafts of a lookup and a request that were right so far

    def before(self, drafting: Mapping[int, object]) -> None:
        """A round begins, in which `drafting` do so: where nothing is pending, other lookups draft."""
        indices, length = self._rows.indices, self._control.most_listened
        for which, pending in self._pending.items():
            if which in drafting:
                pending.clear()  # its verdicts are told by the round
            elif self._rest[which] > 0:
                self._rest[which] -= 1
            elif not pending.keys() & set(indices):
                self._rest[which] = length  # rounds until they draft again: it costs the host a little
                proposal = self._drafters.ask(which, self._draft)
                if proposal is None:
                    continue
                counts, drafts = proposal.drafted().tolist(), proposal.tokens.tolist()
                pending.clear()
                for request, count, draft in zip(indices, counts, drafts, strict=True):
                    pending[request], self._right[which, request] = draft[:count], 0

    def _draft(self, drafter: Drafter) -> Proposal:
        length = self._control.most_listened
        return drafter.propose(length, None).checked(self._rows.active, length, self._vocabulary)

    def after(self, requests: Sequence[int], tokens: Integers, kept: Integers) -> None:
        """A round has committed the first `kept` `[B]` of `tokens` `[B, γ + 1]`."""
        if not any(self._pending.values()):
            return
        most = self._control.most_listened
        texts = {request: own[:count].tolist() for request, own, count in zip(requests, tokens, kept, strict=True)}
        for which, pending in self._pending.items():
            told = []
            for request in texts.keys() & pending.keys():
                draft, right = pending[request], self._right[which, request]
                for token in texts[request]:
                    if right == len(draft) or draft[right] != token:
                        told.append((request, right, min(right + 1, most)))
                        del pending[request]
                        break
                    right += 1
                self._right[which, request] = right
            if told:
                self._control.overheard(which, *zip(*told, strict=True))
