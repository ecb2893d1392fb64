"""Drafts, and learns from the drafted rounds (Test-Time Speculation, arXiv 2605.09329).

Verification computes the target's distribution p at every drafted position anyway. One gradient step brings the
drafter's distribution q nearer to p before the next draft (TTS §4.1, Algorithm 1). The target does not change.
"""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...cuda_graphs import CAPTURING
from ...generation.drafters.checkpoints import state_of
from ...generation.drafters.self_copy import SelfDrafter
from ...generation.drafters.small_model import SmallModelDrafter, as_assistant, states_of
from ...generation.drafters.trainable_drafter import Canvas, TrainableDrafter
from ...generation.engine.drafter import DraftCost, Drafter, DraftSession
from ...generation.engine.kv.base import RowKV
from ...generation.engine.network.snapshot import WeightState, structure
from ...generation.engine.rows import Admission, Integers
from ...generation.engine.sampling.accept import Proposal
from ...generation.engine.sampling.noise import RoundNoise
from ...generation.engine.statistics import LearningStatistics
from ...generation.options import SpeculativeConfig
from ...generation.refusals import LEARNING_MODEL, check
from ...generation.registry import DRAFTERS, register_drafter
from .distillation import distillation_loss, expected_tokens
from .options import TTSOptions
from .trained_weights import Learner, make_learner
from .update_stride import AdaptiveStride, FixedStride


@register_drafter
class DistilledDrafter(Drafter):
    """Drafts with `student` and trains it (TTS Algorithm 1).

    Scope "request" and one row at a time train all weights of the student, as in the paper; with several rows every
    row trains a separate low-rank correction. In wider scopes all rows train the same weights. A student with packed
    weights always trains low-rank corrections.

    With an adaptive stride updates run where they pay (:class:`AdaptiveStride`), and train weights only: corrections
    slow every draft. Until the first update drafting costs no more than the student.

    An update trains a copy. S rounds later, before drafting, the result is published: copied into the drafting
    network. Synchronous learning updates and publishes within round r:

        round         r                  r+1       ...  r+S-1            r+S
        main thread   draft verify learn draft verify   draft verify     publish, draft verify learn
        second thread                    └── update on round r's canvas ──┘

    Args:
        student: drafts with weights of its own.
        how: scope, stride and the other options.
    """

    strategy = "tts"
    assistant = "optional"
    drafts_ahead = False
    learns = True

    @property
    def waited(self) -> float:
        return super().waited + self.student.waited

    def __init__(self, student: TrainableDrafter, how: TTSOptions) -> None:
        self.student, self._how = student, replace(how, scope=how.scope or "request")
        student.context = student.learned_context
        self.has_probabilities, self.max_rows = student.has_probabilities, student.max_rows
        self.uses_pool = student.uses_pool
        self.outlives_changes = not isinstance(student, SelfDrafter)
        self._stride = FixedStride(how.stride) if isinstance(how.stride, int) else None
        self.adaptive_stride = AdaptiveStride()
        self.learner: Learner | None = None
        """Holds what was learned; None before the first generation, and before the first update that pays."""
        self._rise = 0.0  # log τ (before the newest update) - log τ (first weights), on the update's canvas
        self._update: Future[float] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._saved: Mapping[str, Any] | None = None  # for the learner of the next generation

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "DistilledDrafter":
        student = DRAFTERS[config.tts.drafter].make_student(model, assistant, config)
        return cls(student, config.tts)

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[object, ...]:
        target = model.dtype, model.device, *map(id, model.parameters())
        return config.tts, SelfDrafter.kept_for(model, None, config), *target, *_identity(assistant)

    @classmethod
    def check_assistant(
        cls, argument: str, assistant: Any, target: PreTrainedModel, config: SpeculativeConfig
    ) -> None:
        student = DRAFTERS[config.tts.drafter]
        student.check_assistant(argument, assistant, target, config)
        if student is SmallModelDrafter and assistant is not None:
            check({"an assistant with states": states_of(argument, assistant), LEARNING_MODEL: 'tts.drafter="model"'})

    @property
    def policy_copies(self) -> Sequence[Any]:  # type: ignore[override]
        return self.student.policy_copies

    @property
    def cost(self) -> DraftCost | None:  # type: ignore[override]
        return self.student.cost

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return self.student.forwards

    @property
    def cache_bytes(self) -> int:
        return self.student.cache_bytes

    @property
    def column_bytes(self) -> float:
        return self.student.column_bytes

    @property
    def row_bytes(self) -> int:
        return self.student.row_bytes

    def check_length(self, columns: int) -> None:
        self.student.check_length(columns)

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        if self._update is not None:  # left by a generation that was interrupted
            self._update.exception()
            self._update = None
        alone = self._how.scope != "request" or session.rows.capacity == 1
        self._may_learn = self._stride is not None or (alone and bool(self.student.trained(self.student.network)))
        self.student.context = self.student.learned_context if self._may_learn else 0
        if self._stride is not None or (self._may_learn and self._saved is not None):
            self.learner = self._learner_for(session)
        if self._how.scope != "run":
            self._start_anew()
        self._waited = 0  # rounds since the running update began
        self._proposal: Proposal | None = None
        self._executor = ThreadPoolExecutor(1, "tts") if self._how.asynchronous else None
        on_cuda = session.rows.tokens.is_cuda
        self._stream = torch.cuda.Stream(session.rows.tokens.device) if self._executor and on_cuda else None
        self.learning = LearningStatistics(bytes=0 if self.learner is None else self.learner.bytes)
        self.student.begin(session)

    def end(self) -> None:
        try:
            self._finish_update()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            super().end()
            self.student.end()

    def admit(self, admission: Admission) -> None:
        self.student.admit(admission)

    def save_row(self, row: int) -> dict[str, tuple[int, RowKV]] | None:
        return self.student.save_row(row)

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        rows = self.session.rows
        if self._how.scope == "request":
            self._finish_update()
            if rows.capacity == 1:
                self._start_anew()
            elif self._stride is not None:
                assert self.learner is not None
                self.learner.move(source, destination)
                self.learner.reset(range(rows.active, rows.capacity))  # before the next request's prompt comes
        self.student.move(source, destination, columns)

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self._waited += 1
        if self._update is not None:
            if self._update.done() if self._stride is None else self._waited >= self._stride.rounds:
                self._finish_update()
        self._began, self._waited_before = time.perf_counter(), self.waited
        self._proposal = self.student.propose(draft_length, noise)
        return self._proposal

    def learn(self, logits: Tensor, verified: Tensor) -> None:
        assert self._proposal is not None
        if not self._is_due():
            return
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # so that verification is not counted as learning
        started = time.perf_counter()
        if self.learner is None:
            self.learner = self._learner_for(self.session)
        canvas = self.student.canvas(logits.shape[1] - 1, snapshot=self._executor is not None)
        drafted = verified & (self._proposal.drafted() > 0)  # [B]
        if self._executor is None:
            self._publish(self._learn_from(self.learner, canvas, logits, drafted))
        else:
            self._finish_update()
            logits = logits.clone()  # a captured forward reuses them
            is_ready = None
            if self._stream is not None:
                is_ready = torch.cuda.current_stream(logits.device).record_event()  # after all that the update reads
            self._update = self._executor.submit(self._learn_aside, self.learner, canvas, logits, drafted, is_ready)
            self._waited = 0
        self.learning.bytes = max(self.learning.bytes, self.learner.bytes + canvas.bytes)
        self.learning.waited += time.perf_counter() - started

    def observe(self, tokens: Integers, counts: Integers) -> None:
        if self._proposal is not None:
            draft_length = self._proposal.tokens.shape[1]
            seconds = time.perf_counter() - self._began - (self.waited - self._waited_before)
            self.adaptive_stride.observe(float(counts.mean()), draft_length, seconds)
            self._proposal = None
        self.student.observe(tokens, counts)

    def state_dict(self) -> dict[str, Any]:
        """Learned state of scope "run" so far: tensors, not copies. Empty in other scopes and before the first
        generation. Must not be called while a generation runs."""
        if self._how.scope != "run":
            return {}
        if self.learner is None and (self._saved is not None or self._stride is not None):
            return dict(self._saved or {})
        learned = {} if self.learner is None else self.learner.state_dict()
        if self._stride is not None:
            learned["rounds_waited"] = self._stride.waited
        return {"student": self.student.strategy, "price": self.adaptive_stride.state_dict()} | learned

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of :meth:`state_dict` at the next generation; must not be called while one runs. That
        generation warns and learns from the start if the state belongs to another drafter. Scopes other than "run"
        ignore it.
        """
        if self._how.scope != "run":
            return
        if self.learner is not None:
            self.learner.release()
            self.learner = None
        self._saved = state

    def _learner_for(self, session: DraftSession) -> Learner:
        """The learner, made anew where the number of separately learning rows has changed."""
        assert session.target is not None
        rows, how = 1, self._how
        if how.scope == "request" and session.rows.capacity > 1:
            rows = session.target.cache.rows  # forwards may run more rows than are in flight
        if self.learner is not None:
            if self.learner.rows == rows:
                return self.learner
            self.learner.release()
        keeps_initial = self._stride is None or (how.anchor == "initial" and how.anchor_weight > 0)
        learner = make_learner(self.student, rows, how.learning_rate, how.rank, keeps_initial)
        saved, self._saved = self._saved, None
        if saved is not None:
            kind = self.student.strategy
            try:
                if saved.get("student") != kind:
                    raise ValueError(f"it is of a drafter of kind {saved['student']!r}." if saved else "it is empty.")
                if "tensors" in saved:  # else nothing has been learned yet
                    learner.load_state_dict(saved)
                self.adaptive_stride.load_state_dict(saved.get("price"))
                if self._stride is not None and "rounds_waited" in saved:  # older checkpoints lack it
                    self._stride.waited = saved["rounds_waited"]
            except (ValueError, KeyError) as error:
                warnings.warn(
                    f"the saved state of Test-Time Speculation does not fit this drafter of kind {kind!r}: {error} It "
                    "learns from the start. Outputs are not affected.",
                    stacklevel=2,
                )
        return learner

    def _start_anew(self) -> None:
        if self.learner is not None:
            self.learner.reset(range(self.learner.rows))
        self.adaptive_stride.forget()
        if self._stride is not None:
            self._stride.begin()

    def _is_due(self) -> bool:
        if self._stride is not None:
            return self._stride.is_due()
        if not self._may_learn or self._update is not None:
            return False
        rows = self.session.rows
        # Rounds expected ahead. Scope "run": as many as so far. Else rows generate as many tokens as they have, a good
        # guess for long-tailed lengths.
        ahead = float(self.adaptive_stride.rounds)
        if self._how.scope != "run":
            ahead = float(np.minimum(rows.host_generated, rows.remaining).mean()) / self.adaptive_stride.tau
        return self.adaptive_stride.is_due(ahead, self.session.spend)

    def _publish(self, seconds: float) -> None:
        """Copies an update's result into the drafting network, and records its `seconds`."""
        assert self.learner is not None
        self.learning.seconds += seconds
        self.learner.publish()
        if self._stride is None:
            self.adaptive_stride.learned(seconds, self._rise)
            if self.adaptive_stride.is_harmful:
                self._start_anew()

    def _finish_update(self) -> None:
        if self._update is None:
            return
        started = time.perf_counter()
        update, self._update = self._update, None
        # The host waits, not a stream: replays of captured forwards ignore events (TTS App. C.3).
        self._publish(update.result())
        self.learning.waited += time.perf_counter() - started

    def _learn_aside(
        self, learner: Learner, canvas: Canvas, logits: Tensor, drafted: Tensor, is_ready: torch.cuda.Event | None
    ) -> float:
        """Runs `_learn_from` in the second thread; on a GPU on a second stream."""
        if is_ready is None or self._stream is None:
            return self._learn_from(learner, canvas, logits, drafted)
        with CAPTURING, torch.cuda.stream(self._stream):
            self._stream.wait_event(is_ready)
            seconds = self._learn_from(learner, canvas, logits, drafted)
            self._stream.synchronize()
        return seconds

    def _learn_from(self, learner: Learner, canvas: Canvas, logits: Tensor, drafted: Tensor) -> float:
        """Takes K steps on one canvas and the target's logits `[B, γ + 1, V]` of the rows `drafted` (`[B]` bool);
        returns its seconds. With an adaptive stride, measures how much earlier updates raise log τ on this canvas."""
        started = time.perf_counter()
        student, how = self.student, self._how
        # Inference may run under autocast; learning computes in the dtype of the trained weights.
        with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
            first = anchor = None  # [B, C, draft V]
            if learner.initial is not None and (self._stride is None or how.anchor == "initial"):
                with torch.no_grad():
                    first = student.replay(learner.initial, canvas)
            if how.anchor_weight > 0 and how.anchor == "initial":
                anchor = first
            for step in range(how.steps):
                drafts = student.replay(learner.network, canvas)  # [B, C, draft V]
                if step == 0 and first is not None and self._stride is None:
                    now, then = (
                        expected_tokens(of_network.detach(), logits, student.target_ids)[drafted].sum()
                        for of_network in (drafts, first)
                    )
                    self._rise = float((now / then).log())
                weights = student.position_weights(drafts.shape[1])
                losses = distillation_loss(drafts, logits, student.target_ids, weights)  # [B]
                if anchor is not None:
                    losses = losses + how.anchor_weight * distillation_loss(drafts, anchor, None, weights)
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


def _identity(assistant: Any) -> Iterator[object]:
    """Identifies the assistant's state: its structure and weights, or its files' times."""
    if isinstance(assistant, nn.Module):
        network = as_assistant("assistant_model", assistant)
        yield from (*structure(network), WeightState(network))
    elif isinstance(assistant, str):
        yield from state_of(assistant)
