"""Pipes and drafters whose behaviour a test writes down."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.papers.specactor.decoupled.pipe import NOTHING, DraftPipe, mirrored
from spec_trl.papers.specactor.decoupled.worker import DraftWorker, Kind


class InTurn(DraftPipe):
    """Runs the drafter in the caller's thread, when it is asked for the answer. `spoil` makes another answer of each.

    Attributes:
        messages: all of them, in their order.
        most_ahead: most tokens that were drafted after the committed ones of a row.
        wasted: of each time that a row's drafts were dropped: tokens drafted from the wrong one on.
    """

    def __init__(self, drafter: Drafter, spoil: Callable[[Tensor], Tensor] = lambda answer: answer) -> None:
        self.strategy, self.max_rows, self.cost = drafter.strategy, drafter.max_rows, drafter.cost
        self.drafter, self.spoil = drafter, spoil
        self.messages: list[Kind] = []
        self.most_ahead, self.wasted = 0, []

    def begin(self, session: DraftSession, vocabulary: int) -> None:
        session, self.rows, target = mirrored(session), session.rows, session.target
        self.mirror = session.rows
        self.worker = DraftWorker(self.drafter, session, vocabulary, target.cache)

    def send(self, kind: Kind, values: Tensor) -> None:
        self.messages.append(kind)
        if kind == Kind.DRAFT:
            self.asked, self.before = values, self.rows.lengths.clone()  # [B] each
            return
        if kind == Kind.COMMIT:
            for row, length in enumerate(self.mirror.lengths.tolist()):
                start, end = int(self.rows.lengths[row] - values[row]), int(self.rows.lengths[row])
                drafts, text = (
                    self.mirror.tokens[row, start:length].tolist(),
                    self.rows.tokens[row, start:end].tolist(),
                )
                right = next((n for n in range(len(text)) if drafts[n : n + 1] != text[n : n + 1]), len(text))
                if right < len(text) and right < len(drafts):
                    self.wasted.append(len(drafts) - right)
        self.worker.handle(kind, values)

    def receive(self) -> Tensor:
        answer = self.worker.handle(Kind.DRAFT, self.asked)
        assert answer is not None
        self.most_ahead = max(self.most_ahead, int((self.mirror.lengths - self.before).max()))
        return self.spoil(answer)

    def end(self) -> None:
        self.worker.handle(Kind.END, NOTHING)


class Chance(Drafter):
    """Says what will be sampled, right with probability `acceptance` at each position of each request, the same
    whenever it is asked."""

    has_probabilities = False

    def __init__(self, answers: list[list[int]], acceptance: float, seed: int = 0) -> None:
        self.answers, self.acceptance, self.seed = answers, acceptance, seed

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        drafts = [
            [self.token(request, done + step) for step in range(draft_length)]
            for request, done in zip(rows.indices, rows.generated.tolist(), strict=True)
        ]
        return Proposal(torch.tensor(drafts), torch.full_like(rows.lengths, draft_length))

    def token(self, request: int, position: int) -> int:
        """The draft at a generated position."""
        answer = self.answers[request]
        right = answer[position] if position < len(answer) else 0
        is_right = random.Random(f"{self.seed} {request} {position}").random() < self.acceptance
        return right if is_right else (right + 1) % 64
