"""Test-Time Speculation (arXiv 2605.09329): a drafter that learns, while it drafts, from the rounds it drafted.

Verification computes the target's distribution p at every drafted position anyway. That is a distillation sample:
the drafter is the student, the target the teacher, and one gradient step brings the drafter's q nearer to p before it
drafts again (TTS §4.1, Algorithm 1). Nothing of it touches the target, and a draft can change no output.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...configuration import Distillation
from ...engine.cuda_graphs import CAPTURING
from ...engine.drafter import DraftCost, Drafter, DraftSession
from ...engine.noise import RoundNoise, widen
from ...engine.rows import Admission
from ...engine.statistics import LearningStatistics
from ...engine.verification import Proposal
from ..canvas import Canvas, TrainableDrafter
from .learners import Learner, make_learner
from .stride import UpdateStride


class DistilledDrafter(Drafter):
    """Drafts with `student` and lets it learn (TTS Algorithm 1).

    With scope "request" and one row at a time all weights of the student learn, as in the paper; several rows each
    learn a low-rank correction of their own. With the wider scopes all rows teach the same weights. A student whose
    weights are packed learns low-rank corrections in any case.

    Learning happens on a copy, which the drafting network takes over before it drafts the canvas of S rounds later:

        round         r                  r+1       ...  r+S-1            r+S
        main thread   draft verify learn draft verify   draft verify     take over, draft verify learn
        beside it                        └── update on round r's canvas ──┘

    Synchronous learning updates, and takes over, within round r.

    Args:
        student: drafts; its weights are nobody else's.
        how: scope, stride and the rest.
    """

    strategy = "tts"
    learns = True

    def __init__(self, student: TrainableDrafter, how: Distillation) -> None:
        self.student, self._how = student, how
        student.context = student.learned_context
        self.has_probabilities, self.max_rows = student.has_probabilities, student.max_rows
        self._stride = UpdateStride(how.stride)
        self._learner: Learner | None = None
        self._update: Future[float] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._saved: Mapping[str, Any] | None = None  # for the learner of the next generation

    @property
    def cost(self) -> DraftCost | None:  # type: ignore[override]
        return self.student.cost

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return self.student.forwards

    @property
    def cache_bytes(self) -> int:
        return self.student.cache_bytes

    def check_length(self, columns: int) -> None:
        self.student.check_length(columns)

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        if self._update is not None:  # of a generation that was broken off
            self._update.exception()
            self._update = None
        learner = self._learner = self._make_learner(session)
        if self._how.scope != "run":
            learner.reset(range(learner.rows))
        self._stride.begin()
        self._waited = 0  # rounds since the update under way was begun
        self._proposal: Proposal | None = None
        self._executor = ThreadPoolExecutor(1, "tts") if self._how.asynchronous else None
        on_cuda = session.rows.tokens.is_cuda
        self._stream = torch.cuda.Stream(session.rows.tokens.device) if self._executor and on_cuda else None
        self.learning = LearningStatistics(bytes=learner.bytes)
        self.student.begin(session)

    def end(self) -> None:
        try:
            self._take_over()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            super().end()
            self.student.end()

    def admit(self, admission: Admission) -> None:
        self.student.admit(admission)

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        rows = self.session.rows
        if self._how.scope == "request":
            self._take_over()
            assert self._learner is not None
            self._learner.move(source, destination)
            self._learner.reset(range(rows.active, rows.capacity))  # before the next request's prompt stands there
            if rows.capacity == 1:
                self._stride.begin()
        self.student.move(source, destination, columns)

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self._waited += 1
        if self._waited >= self._stride.rounds:
            self._take_over()
        self._proposal = self.student.propose(draft_length, noise)
        return self._proposal

    def learn(self, logits: Tensor, verified: Tensor) -> None:
        assert self._proposal is not None and self._learner is not None
        if not self._stride.is_due():
            return
        started = time.perf_counter()
        canvas = self.student.canvas(logits.shape[1] - 1, snapshot=self._executor is not None)
        drafted = verified & (self._proposal.lengths > 0)  # [B]
        learner = self._learner
        if self._executor is None:
            self.learning.seconds += self._learn_from(learner, canvas, logits, drafted)
            learner.publish()
        else:
            self._take_over()
            logits = logits.clone()  # a captured forward reuses them
            dispatched = None
            if self._stream is not None:
                dispatched = torch.cuda.current_stream(logits.device).record_event()  # behind all that is read
            self._update = self._executor.submit(self._learn_aside, learner, canvas, logits, drafted, dispatched)
            self._waited = 0
        self.learning.bytes = max(self.learning.bytes, learner.bytes + canvas.bytes)
        self.learning.waited += time.perf_counter() - started

    def observe(self, tokens: int) -> None:
        if self._proposal is not None:
            self._stride.observe(tokens / len(self._proposal.lengths))
            self._proposal = None
        self.student.observe(tokens)

    def state_dict(self) -> dict[str, Any]:
        """What scope "run" has learned so far, for a checkpoint: the tensors themselves, not copies.

        Empty in the other scopes and before the first generation; not while one runs.
        """
        if self._how.scope != "run":
            return {}
        if self._learner is None:
            return dict(self._saved or {})
        return {"student": self.student.strategy} | self._learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` gave, from the next generation on; not while one runs.

        That one warns, and learning starts anew, where the state is not that of such a drafter. The other scopes start
        anew anyway, and take no notice.
        """
        if self._how.scope != "run":
            return
        if self._learner is not None:
            self._learner.release()
            self._learner = None
        self._saved = state

    def _make_learner(self, session: DraftSession) -> Learner:
        """The learner there is, or another one where another number of rows learn apart."""
        assert session.target is not None
        rows = 1
        if self._how.scope == "request" and session.rows.capacity > 1:
            rows = session.target.cache.rows  # forwards may run more rows than are in flight
        if self._learner is not None:
            if self._learner.rows == rows:
                return self._learner
            self._learner.release()
        keeps_initial = self._how.anchor == "initial" and self._how.anchor_weight > 0
        learner = make_learner(self.student, rows, self._how.learning_rate, self._how.rank, keeps_initial)
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._restore(learner, saved)
        return learner

    def _restore(self, learner: Learner, saved: Mapping[str, Any]) -> None:
        kind = self.student.strategy
        try:
            if saved.get("student") != kind:
                raise ValueError(f"it is that of a drafter of kind {saved['student']!r}." if saved else "it is empty.")
            learner.load_state_dict(saved)
        except (ValueError, KeyError) as error:
            warnings.warn(
                f"the saved state of Test-Time Speculation does not fit this drafter of kind {kind!r}: {error} It "
                "starts to learn anew. Outputs are not affected.",
                stacklevel=2,
            )

    def _take_over(self) -> None:
        """Waits for the update under way, if any, and drafts with what it learned from here on."""
        if self._update is None:
            return
        started = time.perf_counter()
        update, self._update = self._update, None
        # The host waits, not a stream: replays of captured forwards take no notice of events (TTS App. C.3).
        self.learning.seconds += update.result()
        assert self._learner is not None
        self._learner.publish()
        self.learning.waited += time.perf_counter() - started

    def _learn_aside(
        self, learner: Learner, canvas: Canvas, logits: Tensor, drafted: Tensor, dispatched: torch.cuda.Event | None
    ) -> float:
        if dispatched is None or self._stream is None:
            return self._learn_from(learner, canvas, logits, drafted)
        with CAPTURING, torch.cuda.stream(self._stream):
            self._stream.wait_event(dispatched)
            seconds = self._learn_from(learner, canvas, logits, drafted)
            self._stream.synchronize()
        return seconds

    def _learn_from(self, learner: Learner, canvas: Canvas, logits: Tensor, drafted: Tensor) -> float:
        """K steps on one canvas, given the target's `logits` `[B, γ + 1, V]` and which rows `drafted`; seconds."""
        started = time.perf_counter()
        student, how = self.student, self._how
        # Inference may run under autocast; learning computes in the dtype of what learns.
        with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
            anchor = None
            if how.anchor_weight > 0 and how.anchor == "initial":
                with torch.no_grad():
                    anchor = student.replay(learner.initial(), canvas)  # [B, C, draft V]
            for _ in range(how.steps):
                drafts = student.replay(learner.network, canvas)  # [B, C, draft V]
                weights = student.position_weights(drafts.shape[1])
                losses = distillation_loss(drafts, logits, student.target_ids, weights)  # [B]
                if anchor is not None:
                    losses = losses + how.anchor_weight * divergence(anchor, drafts, weights)
                elif how.anchor_weight > 0:
                    anchor = drafts.detach()  # q_t: at q = q_t itself the term has no gradient
                losses = losses.where(drafted, 0)
                loss = losses.sum() if learner.rows > 1 else losses.sum() / drafted.sum().clamp(min=1)
                gradients = torch.autograd.grad(loss, learner.tensors, allow_unused=True)
                norms = torch._foreach_norm([gradient for gradient in gradients if gradient is not None])
                if not bool(torch.stack([loss, *norms]).isfinite().all()):
                    break
                learner.step(gradients, drafted)
            else:
                self.learning.updates += 1
        return time.perf_counter() - started


def distillation_loss(drafts: Tensor, target: Tensor, target_ids: Tensor | None, weights: Sequence[float]) -> Tensor:
    """Σ_k w_k KL(p_k ‖ q_k) of each row, in nats, at temperature 1 (TTS §4.1).

    Over a pruned vocabulary p is renormalised on it, and positions whose likeliest token lies outside teach nothing,
    as in EAGLE-3's own training.

    Args:
        drafts: `[B, C, draft vocabulary]` raw logits of q, with gradient.
        target: `[B, >= C, V]` raw logits of p.
        target_ids: `[draft vocabulary]` int64 in the target's vocabulary; None: it is the same.
        weights: w_k, C of them.

    Returns:
        `[B]`.
    """
    scores = widen(target[:, : drafts.shape[1]])  # [B, C, V]
    if target_ids is None:
        return divergence(scores, drafts, weights)
    known = torch.isin(scores.argmax(-1), target_ids)  # [B, C]
    return divergence(scores[..., target_ids], drafts, weights, known)


def divergence(teacher: Tensor, drafts: Tensor, weights: Sequence[float], known: Tensor | None = None) -> Tensor:
    """Σ_k w_k KL(a_k ‖ q_k) `[B]` of the distributions with logits `teacher` and `drafts`, both `[B, C, draft V]`.

    Over the positions that are `known`, `[B, C]` bool."""
    a, q = widen(teacher).log_softmax(-1), widen(drafts).log_softmax(-1)
    terms = a.exp() * (a - q)  # [B, C, draft V]
    losses = terms.where(a > -torch.inf, 0).sum(-1)  # [B, C]; a token that is ruled out: 0 log 0
    if known is not None:
        losses = losses.where(known, 0)
    return losses @ torch.tensor(weights, dtype=losses.dtype, device=losses.device)  # [B]
