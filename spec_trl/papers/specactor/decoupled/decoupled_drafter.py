"""Proposes windows that another thread or rank drafts: the verifier's side of decoupled execution."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ....generation.engine.drafter import Drafter, DraftSession
from ....generation.engine.rows import Admission, Integers
from ....generation.engine.sampling.accept import Proposal
from ....generation.engine.sampling.noise import RoundNoise
from ....generation.planner.acceptance import MAX_DRAFT_LENGTH
from .pipe import DraftPipe, DraftThread
from .worker import Kind


if TYPE_CHECKING:
    from ..reconfiguration import RequestPlans


class DecoupledDrafter(Drafter):
    """Proposes the window drafted while the target verified the round before, and requests the next window, drafted
    while the target verifies this one. The engine's loop is the same as with other drafters.

    A period is a round. A row of L committed tokens has pending drafts. A round verifies at most γ of them while the
    drafter adds a window of w = γ + 1:

        period 1   verifies  p1 p2 p3        drafts  n1 n2 n3 n4     (γ = 3)
                   target's  p1 p2 p3 n1     all as drafted: n2 n3 n4 are verified next, γ + 1 tokens are committed
        period 2   verifies  n2 n3 n4        drafts  m1 m2 m3 m4
                   target's  n2 x            other than drafted: the rest is dropped, 2w - 1 tokens at most
        period 3   verifies  nothing         drafts  o1 o2 o3 o4     from x on; the row decodes one token, y
                   target's  y               y = o1: o2 o3 o4 are verified next; else again as in period 3

    One rule covers all cases: drafts stay as far as they continue the committed text, whichever drafts were verified.
    The paper's verifier waits for the drafter in period 3; here it decodes (:func:`~.busy_window_tokens`). Drafter and
    target wait for each other after every period, so drafts and statistics do not depend on their speed.

    Args:
        pipe: to the drafter.
        plans: window and mode by request (SA Algorithm 2); None: all run ahead by w. A request in coupled mode drafts
            only if it has no pending drafts; in plain mode never.
    """

    has_probabilities = False  # its drafts are verified exactly
    drafts_ahead = False  # already

    def __init__(self, pipe: DraftPipe, plans: "RequestPlans[int] | None" = None) -> None:
        self.pipe = pipe
        self.strategy, self.max_rows, self.cost = pipe.strategy, pipe.max_rows, pipe.cost
        self.beside = "thread" if isinstance(pipe, DraftThread) else "elsewhere"
        self._plans = plans

    @contextmanager
    def claim(self) -> Iterator[None]:
        drafter = self.pipe.drafter
        with super().claim(), nullcontext() if drafter is None else drafter.claim():
            yield

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        assert session.target is not None
        self._vocabulary = session.target.network.config.get_text_config(decoder=True).vocab_size
        capacity = session.rows.capacity
        self._active = 0
        # In host memory, by row: number of committed tokens, limit, number of pending drafts, and these drafts.
        self._lengths, self._limits, self._ahead = torch.zeros(3, capacity, dtype=torch.int64)  # [capacity] each
        self._drafts = torch.zeros(capacity, 2 * (MAX_DRAFT_LENGTH + 1), dtype=torch.int64)  # [capacity, 2w]
        self._due: Tensor | None = None  # [B], tokens of the window that is being drafted
        self.drafted, self.dropped = 0, 0  # tokens
        if self._plans is not None:
            self._plans.begin()
        self.pipe.begin(session, self._vocabulary)

    def end(self) -> None:
        super().end()
        try:
            if self._due is not None:  # the target failed; over gloo the window must be received before END is sent
                self.pipe.receive()
        finally:
            self.pipe.end()

    def admit(self, admission: Admission) -> None:
        rows, first = self.session.rows, admission.first
        state = torch.stack([rows.limits, rows.streams]).cpu()  # [2, B]
        parts = []
        for row in range(first, rows.active):
            prompt = np.frombuffer(rows.prompts[row], dtype=np.int64)  # [prompt length]
            output = prompt[:0]  # [n]
            if row not in admission.first_token_rows:
                output = rows.tokens[row, rows.generated_span(row)].cpu().numpy()
            parts += [np.array([rows.indices[row], *state[:, row].tolist(), len(prompt), len(output)]), prompt, output]
            self._lengths[row], self._limits[row] = len(prompt) + len(output), state[0, row]
            self._ahead[row] = 0
        self._active = rows.active
        self.pipe.send(Kind.ADMIT, torch.from_numpy(np.concatenate(parts)))

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        remaining = self.session.rows.active
        ended = [row for row in range(remaining, self._active) if row not in source]
        for state in (self._lengths, self._limits, self._ahead, self._drafts):
            state[destination] = state[source]
        self._active = remaining
        self.pipe.send(Kind.MOVE, torch.tensor([*destination, *ended]))

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        batch, most = self._active, draft_length + 1
        ahead = self._ahead[:batch]  # [B]
        window = torch.full((batch,), most)  # [B]
        waits = torch.zeros(batch, dtype=torch.bool)  # [B], for verification
        if self._plans is not None:
            plans = [self._plans.of(request) for request in self.session.rows.indices]
            waits = torch.tensor([plan.mode == "coupled" for plan in plans])
            # Coupled requests draft one more: their first draft token coincides with the token being decoded.
            window = (torch.tensor([plan.window for plan in plans]) + waits).clamp(max=most)
        remaining = self._limits[:batch] - self._lengths[:batch] - ahead  # [B]
        # 2w - 1 are ahead at most, of which the first is sure to be right if all before it are.
        due = torch.minimum(window, torch.minimum(2 * window - 1 - ahead, remaining)).clamp(min=0)
        due = due.masked_fill(waits & (ahead > 0), 0)  # [B]
        self.pipe.send(Kind.DRAFT, due)
        self._due = due
        return Proposal(self._drafts[:batch, :draft_length].clone(), ahead.clamp(max=draft_length))  # [B, γ], [B]

    def observe(self, tokens: Integers, counts: Integers) -> None:
        batch = self._active
        if self._due is not None:
            due, self._due = self._due, None
            self._add_window(self.pipe.receive(), due)
        ahead, drafts = self._ahead[:batch], self._drafts[:batch]  # [B], [B, 2w]
        count = torch.from_numpy(counts)  # [B]
        text = torch.from_numpy(tokens[:, : counts.max()])  # [B, K]
        step = torch.arange(text.shape[1])  # [K]
        judged = torch.minimum(count, ahead)  # [B]
        is_right = (drafts[:, : len(step)] == text) & (step < judged[:, None])  # [B, K]
        right = is_right.long().cumprod(1).sum(1)  # [B]
        stays = right == count  # [B]
        text = text.masked_fill(step >= count[:, None], 0)
        self.pipe.send(Kind.COMMIT, torch.cat([count, right, text.T.flatten()]))
        left = (ahead - count).where(stays, 0)  # [B]
        self.dropped += int((ahead - right - left).sum())
        slots = (count[:, None] + torch.arange(drafts.shape[1])).clamp(max=drafts.shape[1] - 1)  # [B, 2w]
        drafts.copy_(drafts.gather(1, slots))
        ahead.copy_(left)
        self._lengths[:batch] += count
        if self._plans is not None:
            self._plans.record(self.session.rows.indices, *(part.tolist() for part in (counts, judged, right)))

    def _add_window(self, answer: Tensor, due: Tensor) -> None:
        """Adds the window in `answer` to the pending drafts; `due`: `[B]`, most tokens by row.

        Raises:
            ValueError: the answer is not a valid window.
        """
        batch, width = len(due), int(due.max())
        if answer.dtype != torch.int64 or len(answer) != batch * (1 + width):
            raise ValueError(f"a window of {len(answer)} numbers came for {batch} rows of {width} drafts at most")
        count, tokens = answer[:batch], answer[batch:].view(batch, width)  # [B], [B, width]
        is_draft = torch.arange(width) < count[:, None]  # [B, width]
        is_token = (tokens >= 0) & (tokens < self._vocabulary)
        if not ((count >= 0) & (count <= due)).all() or not (is_token | ~is_draft).all():
            raise ValueError("a window came with lengths or tokens out of range")
        row, step = is_draft.nonzero(as_tuple=True)
        self._drafts[row, self._ahead[row] + step] = tokens[row, step]
        self._ahead[:batch] += count
        self.drafted += int(count.sum())

    def prepare_assisted_decoding(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ValueError: transformers' own loop is coupled."""
        raise ValueError(
            "a DecoupledDrafter drafts while the target verifies, which transformers' assisted loop does not let it. "
            "Generate with assistant_strategy, or pass the drafter itself."
        )

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return 0 if self.pipe.drafter is None else self.pipe.drafter.forwards

    @property
    def cache_bytes(self) -> int:
        return 0 if self.pipe.drafter is None else self.pipe.drafter.cache_bytes
