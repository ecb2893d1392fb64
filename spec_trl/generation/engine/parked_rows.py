"""K/V and states of rows that ended, parked while tools answer: the next turn of a conversation reads what is new."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import TYPE_CHECKING

from .kv.base import RowKV
from .kv.memory import free_memory
from .rows import Admission, Request, Spans


if TYPE_CHECKING:
    from .rollout import Rollout


@dataclass(frozen=True)
class ParkedRow:
    """A row that ended.

    Args:
        columns: number of first columns of its text that have K/V: all but the last.
        states: the target's K/V of these columns.
        drafters: for drafters with caches, by strategy, number of first columns that the cache has, and K/V.
        names: strategies of the drafters that need not read these columns again.
    """

    columns: int
    states: RowKV
    drafters: dict[str, tuple[int, RowKV]]
    names: set[str]

    @property
    def bytes(self) -> int:
        """Bytes of K/V."""
        states = [self.states, *(states for _, states in self.drafters.values())]
        return sum(part.nbytes for layers in states for pair in layers.values() for part in pair)


class ParkedRows:
    """Rows of a conversation's earlier turn, by a number that stays the same in all turns.

    K/V that was parked and K/V that is computed again are the same: requests of later turns know which columns were
    generated, and these are computed again like steps (:meth:`Request.pieces`). Parked K/V takes at most half of free
    memory; the oldest rows leave first, also when rows in flight need their memory, and are read again.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all conversations."""
        self._rows: dict[int, ParkedRow] = {}  # the oldest first
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
        """Tokens of prompt and completion in this turn, by number. Their text begins the prompt of the next turn."""
        for number, (prompt, completion) in lengths.items():
            self._spans[number] = (*self._spans.get(number, ()), (prompt, prompt + completion - 1))

    def add(self, rollout: "Rollout", row: int) -> None:
        """Parks `row`, which has ended, unless memory lacks, or a drafter must hear all forwards over a text."""
        cache, drafters = rollout.target.cache, rollout.drafters
        columns, number = int(rollout.rows.host_lengths[row]) - 1, self._numbers[rollout.rows.indices[row]]
        self._pop(number)  # another rank has decoded the turns since
        if rollout.queue.requests[rollout.rows.indices[row]].images is not None:
            return  # the family reads whole prompts
        needed = columns * cache.column_bytes + cache.state_bytes // cache.rows
        free = free_memory(rollout.rows.tokens.device)
        while self._bytes + needed > free and (freed := self.drop_oldest()):
            free += freed
        answers = {which: drafters.ask(which, methodcaller("park", row)) for which in list(drafters.in_use)}
        parked = {drafters.names[which]: states for which, states in answers.items() if states is not None}
        if needed > free or (rollout.target.is_heard and len(parked) < len(answers)):
            return
        of_drafters = {name: states for answer in parked.values() for name, states in answer.items()}
        self._rows[number] = ParkedRow(columns, cache.export_row(row, 0, columns), of_drafters, set(parked))
        self._bytes += self._rows[number].bytes

    def bring_back(self, rollout: "Rollout", admission: Admission) -> None:
        """Writes the K/V of admitted rows that were parked into the target's cache; :attr:`Admission.parked` then has
        these rows, for drafters."""
        in_use = {rollout.drafters.names[which] for which in rollout.drafters.in_use}
        for row, request in enumerate(admission.requests, admission.first):
            parked = self._pop(self._numbers[request.index])
            is_read = row >= admission.first + admission.leaders or row in admission.moved  # copied, or sent
            if parked is None or is_read or (rollout.target.is_heard and not in_use <= parked.names):
                continue
            rollout.target.cache.import_row(row, 0, parked.states)
            admission.parked[row] = parked

    def drop_oldest(self) -> int:
        """Drops the row that was parked first; returns its bytes, 0 if there is none."""
        oldest = self._pop(next(iter(self._rows), -1))
        return 0 if oldest is None else oldest.bytes

    def _pop(self, number: int) -> ParkedRow | None:
        row = self._rows.pop(number, None)
        self._bytes -= 0 if row is None else row.bytes
        return row
