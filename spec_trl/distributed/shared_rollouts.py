"""Divides a turn of a rollout among ranks, and returns each rank its completions."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ..generation.engine.parked_rows import ParkedRows
from ..generation.engine.rollout import RequestQueue
from ..generation.engine.rows import Request, prompt_key
from ..papers import load
from .link import Link, naming_the_remedy
from .pool import SharedPool
from .shared_work import ExpectedLengths, dealt_to_holders, longest_first


T = TypeVar("T")


class Sampled(NamedTuple):
    """A completion.

    Args:
        tokens: token ids, EOS included.
        logprobs: of the tokens, in nats; empty if not needed.
        support: `[tokens, ceil(vocabulary / 8)]` uint8 (:func:`~.support.pack`), of rows of this rank; None: not
            needed.
    """

    tokens: list[int]
    logprobs: list[float]
    support: Tensor | None = None


@dataclass(frozen=True)
class Turn:
    """The rows of all ranks, in the order of ranks.

    Args:
        rows: row numbers in the global batch.
        prompts: token ids of every row.
        own: places of this rank's rows in `rows`.
        decoded: places of the rows that this rank may decode.
        shares: whether ranks decode the rows as one pool.
    """

    rows: list[int]
    prompts: list[list[int]]
    own: range
    decoded: range
    shares: bool


class SharedRollouts:
    """Decodes the rows of all ranks, as one pool or every rank for itself.

    Args:
        rank, ranks: this rank, and the number of ranks.
        timeout: most seconds of silence while a rank waits.
        decoding: number of ranks that decode, the first ones; None: all. If fewer than all, `shares` must be True.
        parked: takes the K/V of rows between the turns of a tool loop; None: every turn reads whole texts.
        several_chains: as of the control: ranks may then also decode the same rows with several drafters.

    Attributes:
        pool: of the newest turn; None: this rank decoded its rows alone.
    """

    def __init__(
        self,
        shares: bool,
        rank: int,
        ranks: int,
        timeout: float,
        decoding: int | None = None,
        parked: ParkedRows | None = None,
        several_chains: bool = False,
    ) -> None:
        self._rank, self._timeout, self._parked = rank, timeout, parked
        self._several_chains = several_chains
        self._decoding = decoding or ranks
        self._shares = shares and ranks > 1
        self._expected = ExpectedLengths()
        self._turns = 0
        self._holders: dict[int, int] = {}  # rank by row that was decoded there in the turn before
        self._last_turn: list[tuple[int, list[int]]] | None = None  # this rank's rows, and their tokens then
        self._send_seconds: float | None = None
        self.pool: SharedPool | None = None

    def begin(self) -> None:
        """Begins a rollout: row numbers start at 0."""
        self._last_turn, self._holders = None, {}
        if self._parked is not None:
            self._parked.clear()

    def gather(self, prompts: list[list[int]], have_media: bool = False) -> Turn:
        """Begins the next turn of the rollout with this rank's `prompts` (token ids), possibly none. All ranks must
        call it. If prompts of a rank `have_media`, which are there alone, every rank decodes its rows."""
        ranks = self._gather((self._rows_of(prompts), prompts, have_media))
        counts = [len(prompts) for _, prompts, _ in ranks]
        shares = self._shares and not any(have_media for _, _, have_media in ranks)
        first = sum(counts[: self._rank])
        here, every = range(first, first + counts[self._rank]), range(sum(counts))
        rows = list(every) if self._last_turn is None else [row for rows, *_ in ranks for row in rows]
        self._turns += 1
        self.pool = None
        decoded = here if not shares else every if self._rank < self._decoding else range(0)
        return Turn(rows, [prompt for _, brought, _ in ranks for prompt in brought], here, decoded, shares)

    def _gather(self, value: T) -> list[T]:
        with naming_the_remedy(self._rank):
            return gather_object([value])

    def _rows_of(self, prompts: list[list[int]]) -> list[int]:
        """Returns the global numbers of these rows, which make noise the same for any number of ranks; empty in the
        first turn, whose rows :meth:`gather` numbers.

        Later turns have some rows of a tool loop, in order. A prompt begins with the text of its row at the end of the
        last turn; rows with equal texts are matched in order.
        """
        if self._last_turn is None:
            return []
        before = iter(self._last_turn)
        rows = [next((row for row, seen in before if ids[: len(seen)] == seen), None) for ids in prompts]
        if None in rows:
            raise RuntimeError(
                "a prompt of a later turn does not begin with prompt and completion of the turn before, in the order "
                "of the rows, so that its noise cannot be keyed; leave TRL's _tool_call_loop as it is."
            )
        return [row for row in rows if row is not None]

    def rows_in_flight(self, turn: Turn, limit: int | None) -> int:
        """Number of rows that this rank decodes at once: its share of the turn's rows, at most `limit`."""
        share = -(-len(turn.rows) // self._decoding) if turn.shares else len(turn.own)
        return min(limit or share, share)

    def make_queue(self, turn: Turn, rows: int) -> Callable[[list[Request]], RequestQueue]:
        """Makes the queue of a turn for `generate`, with `rows` rows in flight."""
        order: Sequence[Sequence[int]] = []
        if turn.shares:
            keys = [prompt_key(torch.tensor(prompt)) for prompt in turn.prompts]
            order = longest_first(keys, self._expected.of(keys), rows)
            if self._parked is not None:
                holders = {place: self._holders[row] for place, row in enumerate(turn.rows) if row in self._holders}
                rounds = rows // max(map(len, order))
                order = dealt_to_holders(order, holders, self._decoding, rounds)
            link = self.link()

        def make(requests: list[Request]) -> RequestQueue:
            if self._parked is not None:
                requests = self._parked.begin_turn([turn.rows[place] for place in turn.decoded], requests)
            queue = RequestQueue(requests)
            if turn.shares:
                kind = load("papers.specactor.rank_races").RacingPool if self._several_chains else SharedPool
                queue = self.pool = kind(requests, order, rows, link, self._send_seconds)
            queue.parked = self._parked
            return queue

        return make

    def link(self) -> Link:
        """Link to the ranks that decode the newest turn as one pool."""
        store = dist.PrefixStore(f"spec_trl/{self._turns}", _get_default_store())
        return Link(store, self._rank, self._decoding, self._timeout)

    def exchange(self, turn: Turn, decoded: dict[int, Sampled]) -> dict[int, Sampled]:
        """Returns completions by place: those that this rank `decoded`, and in a pool those of all ranks, which must
        all call it."""
        completions = self._of_all_ranks(turn, decoded) if turn.shares else decoded
        self._last_turn = [(turn.rows[place], turn.prompts[place] + completions[place].tokens) for place in turn.own]
        if self._parked is not None:
            self._parked.end_turn(
                {turn.rows[at]: (len(turn.prompts[at]), len(done.tokens)) for at, done in completions.items()}
            )
        return completions

    def _of_all_ranks(self, turn: Turn, decoded: dict[int, Sampled]) -> dict[int, Sampled]:
        if self.pool is not None:
            self._send_seconds = self.pool.send_seconds
        packed = {place: (array("i", row.tokens), array("f", row.logprobs)) for place, row in decoded.items()}
        ranks = self._gather((packed, self._send_seconds))
        completions = {
            place: Sampled(tokens.tolist(), logprobs.tolist())
            for packed, _ in ranks
            for place, (tokens, logprobs) in packed.items()
        }
        self._holders = {turn.rows[place]: rank for rank, (packed, _) in enumerate(ranks) for place in packed}
        measured = [seconds for _, seconds in ranks if seconds is not None]
        self._send_seconds = median(measured) if measured else None  # the sending rank decides by it
        if self._last_turn is None:  # prompts of later turns do not come back
            lengths: dict[str, list[int]] = {}
            for place, prompt in enumerate(turn.prompts):
                lengths.setdefault(prompt_key(torch.tensor(prompt)), []).append(len(completions[place].tokens))
            self._expected.record(lengths)
        if self.pool is not None:
            self.pool.forget()  # every rank is done with it
        return completions
