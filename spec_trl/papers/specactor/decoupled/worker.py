"""Continues drafts, and drops those that differ from the target: the drafter's side.

Verifier and worker exchange messages: a kind and a flat int64 tensor in host memory, a few hundred bytes per round.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from ....generation.engine.drafter import Drafter, DraftSession
from ....generation.engine.kv.base import KVCache
from ....generation.engine.rows import Request
from ....generation.engine.sampling.noise import RoundNoise
from ....generation.engine.saved_row import SavedRow
from .tail import TailCache


class Kind(IntEnum):
    """Messages of a generation: BEGIN; ADMIT, DRAFT, COMMIT and MOVE repeatedly; END. B: rows in flight."""

    BEGIN = 1
    """A generation begins; the content depends on the pipe."""
    ADMIT = 2
    """Requests entered, in the order of their rows. Per request: index, limit, noise key, number of prompt tokens,
    number of tokens that another rank has generated, and all these tokens."""
    DRAFT = 3
    """`[B]`: number of further tokens to draft by row. Answered by WINDOW."""
    COMMIT = 4
    """`[B]` number k of tokens that a round committed, or that follow prompts; `[B]` number of the row's drafts that
    equal the first of them; the tokens `[B, max k]`. If all k are equal, later drafts stay; else the row's drafts are
    dropped."""
    MOVE = 5
    """Rows that ended, as of :meth:`Rows.drop`."""
    END = 6
    """The generation is over. Answered by an empty WINDOW."""
    WINDOW = 7
    """Answer: `[B]` tokens drafted, and `[B, max asked]` tokens."""
    FAILED = 8
    """Answer: the drafter raised; the UTF-8 bytes of its error."""
    CLOSE = 9
    """No generation follows."""


class DraftWorker:
    """Carries out messages with a drafter, over rows that mirror those of the verifier:

        verifier's row   prompt . . . output . . . |
        mirrored row     prompt . . . output . . . p1 p2 ... | n1 n2 ... nw |
                                                   pending     next window

    The mirror counts drafts as text, so the drafter needs no decoupled mode: it drafts `w` tokens after the text, and
    sometimes rows become shorter.

    Args:
        drafter: used only in the thread or process of the worker.
        session: of the mirrored rows, without target.
        target: the target's cache, if a copy of the target may read it: from DRAFT to its answer a row's columns
            before its last committed token's must not change.
    """

    def __init__(
        self, drafter: Drafter, session: DraftSession, vocabulary: int, target: KVCache | None = None
    ) -> None:
        self._drafter, self._rows, self._vocabulary = drafter, session.rows, vocabulary
        self._do_sample = session.do_sample
        self._committed = torch.zeros_like(session.rows.tokens[:, 0])  # [capacity], tokens of each row
        if target is not None:
            size = 2 * (session.most_drafted + 1)  # 2w: a row's last committed token, and 2w - 1 drafts
            session = replace(session, tail=TailCache(target, self._committed, size))
        drafter.begin(session)

    def handle(self, kind: Kind, values: Tensor) -> Tensor:
        """Carries out one message; returns the window for DRAFT, else an empty tensor.

        Raises:
            ValueError: the message does not fit the rows.
        """
        match kind:
            case Kind.ADMIT:
                self._admit(values)
            case Kind.DRAFT:
                return self._draft(values)
            case Kind.COMMIT:
                self._commit(values)
            case Kind.MOVE:
                self._move(values.tolist())
            case Kind.END:
                self._drafter.end()
            case _:
                raise ValueError(f"a drafter cannot carry out {kind!r}")
        return values[:0]

    def _admit(self, values: Tensor) -> None:
        rows, requests, at = self._rows, [], 0
        while at < len(values):
            _require(len(values) >= at + 5, "ADMIT", "length")
            index, limit, stream, first, more = values[at : at + 5].tolist()
            length = first + more
            text = values[at + 5 : at + 5 + length]  # [length]
            _require(first >= 1 and more >= 0 and length == len(text), "ADMIT", "numbers of tokens")
            _require(length <= limit < rows.columns, "ADMIT", "limit")
            self._require_tokens(text, "ADMIT")
            saved = SavedRow(text[first:], None, 0, {}) if more else None
            requests.append(Request(index, text[:first], limit, stream, saved))
            at += 5 + length
        _require(0 < len(requests) <= rows.capacity - rows.active, "ADMIT", "number of requests")
        admission = rows.admit(requests)  # already sorted, by the verifier
        self._committed[admission.first : rows.active] = rows.lengths[admission.first :]
        self._drafter.admit(admission)

    def _draft(self, values: Tensor) -> Tensor:
        rows, counts = self._rows, values.to(self._committed.device)  # [B]
        _require(len(counts) == rows.active > 0, "DRAFT", "number of rows")
        _require(bool(((counts >= 0) & (rows.lengths + counts < rows.columns)).all()), "DRAFT", "windows")
        width = int(counts.max())
        if width == 0:
            return values
        noise = RoundNoise(rows.noise_keys(width), self._vocabulary) if self._do_sample else None
        proposal = self._drafter.propose(width, noise).to(rows.tokens.device)
        if proposal.scores is not None and proposal.scores.isnan().any():
            raise FloatingPointError("the draft network returned NaN logits")
        drafted = torch.minimum(proposal.drafted(), counts).clamp(min=0)  # [B]
        is_draft = torch.arange(width, device=drafted.device) < drafted[:, None]  # [B, width]
        tokens = proposal.tokens.masked_fill(~is_draft, 0)  # [B, width]
        self._require_tokens(tokens, "the drafter's proposal")
        rows.write(0, tokens)
        rows.commit((rows.lengths + drafted).cpu().numpy(), None)
        self._drafter.observe(tokens.cpu().numpy(), drafted.cpu().numpy())
        return torch.cat([drafted, tokens.flatten()]).cpu()

    def _commit(self, values: Tensor) -> None:
        rows, batch = self._rows, self._rows.active
        _require(batch > 0 and len(values) % batch == 0 and len(values) > 2 * batch, "COMMIT", "shape")
        counts, right, *_ = values = values.to(self._committed.device).view(-1, batch)  # [B] each
        tokens = values[2:].T  # [B, K]
        step = torch.arange(tokens.shape[1], device=counts.device)  # [K]
        ends = self._committed[:batch] + counts  # [B]
        _require(bool(((counts >= 0) & (counts <= len(step)) & (ends <= rows.limits)).all()), "COMMIT", "lengths")
        is_draft = (right >= 0) & (right <= counts) & (self._committed[:batch] + right <= rows.lengths)  # [B]
        _require(bool(is_draft.all()), "COMMIT", "numbers of right drafts")
        self._require_tokens(tokens, "COMMIT")
        columns = self._committed[:batch, None] + step  # [B, K]
        text = rows.tokens[:batch].gather(1, columns)  # [B, K]
        rows.tokens[:batch].scatter_(1, columns, tokens.where(step < counts[:, None], text))
        # Drafts are dropped from the first wrong one on: the drafter's K/V is invalid from there, even if the chain of
        # another drafter was accepted further.
        stays = right == counts  # [B]
        rows.commit(rows.lengths.where(stays, torch.minimum(ends - counts + right + 1, ends)).cpu().numpy(), None)
        self._drafter.observe(tokens[:, :0].cpu().numpy(), np.zeros(batch, np.int64))  # rows have become shorter
        self._committed[:batch] = ends
        rows.commit(rows.lengths.where(stays, ends).cpu().numpy(), None)

    def _move(self, finished: list[int]) -> None:
        rows = self._rows
        _require(len({*finished} & {*range(rows.active)}) == len(finished) > 0, "MOVE", "rows")
        source, destination = rows.drop(finished)
        self._committed[destination] = self._committed[source]
        self._drafter.move(source, destination, rows.host_lengths[destination].tolist())

    def _require_tokens(self, tokens: Tensor, message: str) -> None:
        _require(bool(((tokens >= 0) & (tokens < self._vocabulary)).all()), message, "tokens")


def work(
    drafter: Drafter,
    begin: Callable[[Tensor], DraftWorker],
    receive: Callable[[], tuple[Kind, Tensor]],
    answer: Callable[[Tensor | Exception], None],
) -> None:
    """Carries out messages until CLOSE. An error of the drafter is the answer until the next generation.

    Args:
        begin: makes the worker of a generation from BEGIN's content.
        receive: waits for the next message.
        answer: sends a WINDOW's content, or the error of a failed drafter.
    """
    worker: DraftWorker | None = None
    failure: Exception | None = None
    while (message := receive())[0] != Kind.CLOSE:
        kind, values = message
        try:
            if kind == Kind.BEGIN:
                failure, worker = None, begin(values)
            elif failure is None:
                assert worker is not None, f"{kind.name} came before BEGIN"
                values = worker.handle(kind, values)
        except Exception as error:
            failure = error
            with suppress(Exception):
                drafter.end()
        if kind in (Kind.DRAFT, Kind.END):
            answer(values if failure is None else failure)
    del failure  # its traceback references this frame, and so the caches


def _require(is_right: bool, message: str, what: str) -> None:
    if not is_right:
        raise ValueError(f"{message} cannot be right: {what} out of range")
