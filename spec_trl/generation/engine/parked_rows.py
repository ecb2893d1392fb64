"""Parks K/V and states of ended rows while tools answer, for the next turn of a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller

from .forwards.runner import EagerRunner
from .guarded_drafters import GuardedDrafters
from .kv.memory import free_memory
from .rows import Request, Rows, Spans
from .saved_row import SavedKV, SavedRow


class ParkedRows:
    """Rows of a conversation's earlier turn, by a number that is the same in all turns.

    Parked K/V equals K/V that is computed again: requests of later turns know the generated columns, to be
    computed like steps (:meth:`Request.pieces`). Parked K/V takes at most half of free memory; the oldest rows leave
    first, also for rows in flight, and are read again.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._rows: dict[int, SavedRow] = {}  # the oldest first
        self._spans: dict[int, Spans] = {}
        self._numbers: list[int] = []  # by index of request
        self._bytes = 0

    def begin_turn(self, numbers: Sequence[int], requests: Sequence[Request]) -> list[Request]:
        """Returns the `requests` of a turn with the spans of the conversations' earlier turns. Request i belongs to
        conversation `numbers[i]`; other conversations are over."""
        self._numbers = list(numbers)
        for number in self._rows.keys() - set(numbers):
            self._pop(number)
        self._spans = {number: self._spans.get(number, ()) for number in numbers}
        return [
            replace(request, spans=self._spans[number]) for number, request in zip(numbers, requests, strict=True)
        ]

    def end_turn(self, lengths: Mapping[int, tuple[int, int]]) -> None:
        """Adds each number's tokens of prompt and completion in this turn; they begin the prompt of the next turn."""
        for number, (prompt, completion) in lengths.items():
            self._spans[number] = (*self._spans.get(number, ()), (prompt, prompt + completion - 1))

    def add(self, request: Request, row: int, rows: Rows, target: EagerRunner, drafters: GuardedDrafters) -> None:
        """Parks `row`, as `request` has ended, unless memory lacks or a drafter reads its hidden states."""
        cache, number = target.cache, self._numbers[request.index]
        self._pop(number)  # another rank has decoded the turns since
        if request.media is not None:
            return  # the family reads whole prompts
        needed = (int(rows.host_lengths[row]) - 1) * cache.column_bytes + cache.fixed_bytes // cache.rows
        free = free_memory(rows.tokens.device)
        while self._bytes + needed > free and (freed := self.drop_oldest()):
            free += freed
        kv: SavedKV = {}
        must_read = False
        for drafter in list(drafters.in_use):
            answer = drafters.ask(drafter, methodcaller("save_row", row))
            must_read |= answer is None
            if answer is not None:
                kv[drafters.names[drafter]] = 0, dict  # whoever is missing must read hidden states again
                kv |= {owner: (end, partial(dict, states)) for owner, (end, states) in answer.items()}
        if needed > free or (target.has_listeners and must_read):
            return
        saved = rows.save(row, cache, 0, want_logprobs=False)
        self._rows[number] = replace(saved, tokens=None, kv=kv | saved.kv)  # the next prompt has the tokens
        self._bytes += self._rows[number].bytes

    def saved_of(
        self, requests: Sequence[Request], target: EagerRunner, drafters: GuardedDrafters
    ) -> list[Request]:
        """Returns `requests`, which enter rows now, with the rows that were parked for them, which are no longer
        parked."""
        in_use = {drafters.names[drafter] for drafter in drafters.in_use}
        found = []
        for request in requests:
            saved = self._pop(self._numbers[request.index])
            reads = saved is None or (target.has_listeners and not in_use <= saved.kv.keys())
            found.append(request if reads or request.saved is not None else replace(request, saved=saved))
        return found

    def drop_oldest(self) -> int:
        """Drops the row parked first; returns its bytes, 0 without a row."""
        oldest = self._pop(next(iter(self._rows), -1))
        return 0 if oldest is None else oldest.bytes

    def _pop(self, number: int) -> SavedRow | None:
        row = self._rows.pop(number, None)
        self._bytes -= 0 if row is None else row.bytes
        return row
