"""How requests enter: who is given a row, and the first tokens of those whose prompts have been read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...scheduling.admission import Patience
from .drafter import DraftSession
from .memory import sent
from .noise import RoundNoise
from .outcome import Outcome
from .request_queue import RequestQueue
from .room import KVRoom
from .rows import Admission, Request, Rows
from .verification import Verdict


class Entrance:
    """Gives free `rows` to the requests that wait in `queue`, as patience and memory let it (`room`; None: there is
    enough); `keys`: of all requests' prompts."""

    def __init__(self, queue: RequestQueue, rows: Rows, keys: Sequence[str], room: KVRoom | None) -> None:
        self._queue, self._rows, self._keys, self._room = queue, rows, keys, room
        self._patience = Patience(rows.capacity)

    def taken(self) -> list[Request]:
        """Requests that get rows now."""
        rows, queue, room, keys = self._rows, self._queue, self._room, self._keys
        free = 0 if room is not None and room.is_full else rows.capacity - rows.active
        next_key = None if queue.upcoming is None else keys[queue.upcoming.index]
        if not free or self._patience.waits(free, {keys[index] for index in rows.indices}, next_key):
            return []
        taken = queue.take(free, rows.active) if queue.waiting or not rows.active else []
        if taken and room is not None:
            fitting = room.fitting(taken)
            queue.put_back(taken[fitting:])
            taken = taken[:fitting]
        return taken


def first_tokens(admission: Admission, logits: Tensor, session: DraftSession, want_logprobs: bool) -> Outcome:
    """Draws the first token of each row that begins, with the noise of its position: of all copies of a prompt from
    one row of `logits` (`[n, 1, V]`, of the n leaders that begin). The others take no token."""
    rows, begun = session.rows, admission.begun
    place = {leader: place for place, leader in enumerate(dict.fromkeys(begun.values()))}
    places = [[*begun], [place[leader] for leader in begun.values()]]
    at, own = sent(torch.tensor(places), rows.tokens.device)  # [m] each
    if len(begun) > len(logits):
        logits = logits[own]  # [m, 1, V]
    noise = RoundNoise(rows.noise_keys(1)[at], logits.shape[-1]) if session.do_sample else None
    drawn = session.pipeline.draw(logits, noise, want_logprobs=want_logprobs, rows=[*begun])

    def of_all(part: Tensor) -> Tensor:
        """`[B, 1]` of `[m, 1]`."""
        return part.new_zeros(rows.active, 1).index_copy_(0, at, part)

    logprobs = None if drawn.logprobs is None else of_all(drawn.logprobs)
    verdict = Verdict(of_all(drawn.tokens), of_all(drawn.scores), logprobs)
    return Outcome.of_first_tokens(verdict, [*begun], rows.room)
