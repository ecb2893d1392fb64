"""A drafter that runs ahead: it drafts on from its own drafts, and goes back where the target went another way."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...engine.cache import RaggedCache, TailCache
from ...engine.drafter import Drafter, DraftSession
from ...engine.noise import RoundNoise
from ...engine.rows import Request
from .messages import Kind


class DraftWorker:
    """Carries out messages with a drafter, over rows that mirror the verifier's:

        verifier's row   prompt . . . output . . . |
        mirrored row     prompt . . . output . . . p1 p2 ... | n1 n2 ... nw |
                                                   pending     next window

    The mirror counts drafts as text. So the drafter needs to know nothing of decoupling: it is asked for `w` tokens
    after the text, and told now and then that rows have become shorter.

    Args:
        drafter: drafts in the thread or process of the worker alone.
        session: of the mirrored rows, without target.
        vocabulary: number of tokens.
        target: the target's cache, where a copy of the target may read it: from DRAFT to its answer a row's columns
            before its last committed token's must stay as they are.
    """

    def __init__(
        self, drafter: Drafter, session: DraftSession, vocabulary: int, target: RaggedCache | None = None
    ) -> None:
        self._drafter, self._rows, self._vocabulary = drafter, session.rows, vocabulary
        self._do_sample = session.do_sample
        self._committed = torch.zeros_like(session.rows.tokens[:, 0])  # [capacity], tokens of each row
        if target is not None:
            size = 2 * (session.most_drafted + 1)  # 2w: a row's last committed token, and 2w - 1 drafts
            session = replace(session, tail=TailCache(target, self._committed, size))
        drafter.begin(session)

    def handle(self, kind: Kind, values: Tensor) -> Tensor | None:
        """Carries out one message; returns the content of the answer, to DRAFT alone.

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
        return None

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
            generated = text[first:] if more else None
            requests.append(Request(index, text[:first], limit, stream, generated, head=length - 1))
            at += 5 + length
        _require(0 < len(requests) <= rows.capacity - rows.active, "ADMIT", "number of requests")
        admission = rows.admit(requests)  # they come in the verifier's order, in which nothing is left to sort
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
        found = torch.minimum(proposal.drafted(), counts).clamp(min=0)  # [B]
        is_draft = torch.arange(width, device=found.device) < found[:, None]  # [B, width]
        tokens = proposal.tokens.masked_fill(~is_draft, 0)  # [B, width]
        self._require_tokens(tokens, "the drafter's proposal")
        rows.write(0, tokens)
        rows.commit((rows.lengths + found).cpu().numpy(), None)
        self._drafter.observe(tokens.cpu().numpy(), found.cpu().numpy())
        return torch.cat([found, tokens.flatten()]).cpu()

    def _commit(self, values: Tensor) -> None:
        rows, batch = self._rows, self._rows.active
        _require(batch > 0 and len(values) % batch == 0 and len(values) > 2 * batch, "COMMIT", "shape")
        kept, stays, *_ = values = values.to(self._committed.device).view(-1, batch)  # [B] each
        tokens = values[2:].T  # [B, K]
        step = torch.arange(tokens.shape[1], device=kept.device)  # [K]
        ends = self._committed[:batch] + kept  # [B]
        _require(bool(((kept >= 0) & (kept <= len(step)) & (ends <= rows.limits)).all()), "COMMIT", "lengths")
        self._require_tokens(tokens, "COMMIT")
        columns = self._committed[:batch, None] + step  # [B, K]
        text, is_kept = rows.tokens[:batch].gather(1, columns), step < kept[:, None]  # [B, K] each
        right = ((text == tokens) & is_kept).long().cumprod(1).sum(1)  # [B]
        rows.tokens[:batch].scatter_(1, columns, tokens.where(is_kept, text))
        # Dropped drafts end at the first that was wrong: the drafter computed nothing that holds from there on, even
        # where another one's chain has gone further.
        held = torch.minimum(self._committed[:batch] + right + 1, ends)  # [B]
        rows.commit(rows.lengths.where(stays.bool(), held).cpu().numpy(), None)
        self._drafter.observe(tokens[:, :0].cpu().numpy(), np.zeros(batch, np.int64))  # rows have become shorter
        self._committed[:batch] = ends
        rows.lengths.copy_(rows.lengths.where(stays.bool(), ends))
        _require(bool((rows.lengths >= ends).all()), "COMMIT", "drafts that stay")
        rows.commit(rows.lengths.cpu().numpy(), None)

    def _move(self, finished: list[int]) -> None:
        rows = self._rows
        _require(len({*finished} & {*range(rows.active)}) == len(finished) > 0, "MOVE", "rows")
        source, destination = rows.drop(finished)
        self._committed[destination] = self._committed[source]
        self._drafter.move(source, destination, rows.host_lengths[destination].tolist())

    def _require_tokens(self, tokens: Tensor, message: str) -> None:
        _require(bool(((tokens >= 0) & (tokens < self._vocabulary)).all()), message, "tokens")


def _require(is_right: bool, message: str, what: str) -> None:
    if not is_right:
        raise ValueError(f"{message} cannot be right: {what} out of range")
