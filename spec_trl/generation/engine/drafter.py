"""Defines the base class of drafters and the token-by-token draft loop."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..options import SpeculativeConfig
from ..planner.acceptance import MAX_DRAFT_LENGTH
from .kv.base import KVCache, RowKV
from .rows import Admission, Integers, PrefixView, Request, Rows
from .sampling.accept import Proposal
from .sampling.noise import Draw, RoundNoise, draw, stream_keys, widen
from .sampling.penalty import Seen
from .sampling.processors import Filters, LogitsPipeline, draw_processed
from .statistics import LearningStatistics


@dataclass(frozen=True)
class DraftSession:
    """One generation, from a drafter's view.

    Args:
        pipeline: the target's processors, which a drafter that samples applies too (ER: the target's temperature,
            top-k and top-p).
        do_sample: False: greedy.
        target: the :class:`~.EagerRunner` of the target; None inside transformers' loop, where it has another cache.
        keep_logits: whether proposals must carry their logits (rejection verification).
        most_drafted: largest γ of a round.
        spend: takes seconds of learning from the control's exploration budget; False: the budget holds less.
        tail: of a drafter that runs ahead, without `target`: a cache in which a copy of the target reads the target's
            K/V and writes that of drafts. None: the drafter computes both.
    """

    rows: Rows
    pipeline: LogitsPipeline
    do_sample: bool
    target: Any
    keep_logits: bool
    most_drafted: int = MAX_DRAFT_LENGTH
    spend: Callable[[float], bool] = lambda _: True
    tail: KVCache | None = None

    @property
    def most_columns(self) -> list[int]:
        """Columns by row, drafts included, at the peak."""
        return [length + self.most_drafted for length in self.rows.most]

    @property
    def drawn_by(self) -> Filters | None:
        """Filters, if :meth:`draw` depends on nothing but logits, noise, seen text and these; None: it also depends on
        the rows, or returns logits."""
        return None if self.keep_logits else self.pipeline.only_filters

    @property
    def text(self) -> Tensor | None:
        """`[B, W]` int64: the seen text for :meth:`draw`, if `drawn_by` has a penalty."""
        penalised = self.pipeline.penalised
        return None if penalised is None or self.keep_logits else penalised.of_rows()

    def draw(
        self,
        logits: Tensor,
        noise: RoundNoise | None,
        step: int,
        previous: Draw | None = None,
        seen: Seen | None = None,
    ) -> tuple[Draw, Tensor | None]:
        """Draws the draft tokens at `step` as the target would from the same logits `[B, 1, V]`; returns the draw and,
        the processed logits `[B, 1, V]` if proposals must carry them. `seen`: text and drafts, if `drawn_by` has a
        penalty.

        A row whose processors allow no token, or refuse its prefix, gets a score of -inf: its draft ends there, and
        processors do not see it again (`previous` is the draw at the step before).
        """
        if not self.pipeline.may_refuse:
            if not self.keep_logits:
                return self.pipeline.draw(logits, noise, step, seen=seen), None
            processed = self.pipeline(widen(logits), step).clone()  # the next forward may overwrite them
            return draw(processed, noise, step), processed
        shown = self.rows.lengths > 0 if previous is None else previous.scores[:, 0] > -torch.inf  # [B]
        scores, passed = self.pipeline.attempt(widen(logits[:, 0]), step, shown)
        drawn = draw_processed(scores[:, None], noise, step)
        drawn = replace(drawn, scores=drawn.scores.masked_fill(~passed[:, None], -torch.inf))
        return drawn, scores[:, None] if self.keep_logits else None


@dataclass(frozen=True)
class DraftCost:
    """Cost of a forward of a drafting network, for predictions: bytes of read weights, the target's head included, and
    FLOP per row; at most `tokens` draft tokens per row."""

    weight_bytes: float
    dense_flops: float
    tokens: int = 1


class Drafter(CandidateGenerator):
    """Proposes draft tokens for a ragged batch, and for batch 1 in transformers' assisted loop.

    The engine calls `begin` once per generation, then in every round `admit` for rows that enter, `move` for rows that
    fill a gap, and `propose`. `observe` passes committed tokens, the first one included. A drafter is dropped for the
    rest of the generation after any exception.
    """

    strategy: str = "custom"
    """The `assistant_strategy`, if registered; the name in statistics."""
    assistant: Literal["none", "optional", "required"] = "none"
    """Whether it drafts with the `assistant_model`."""
    has_probabilities: bool
    """Whether proposals can carry draft logits, for rejection verification."""
    uses_pool: bool = False
    """Whether its K/V is in pages if the target's is, instead of whole rows."""
    max_rows: int = sys.maxsize
    """Most rows in flight that it drafts for; beyond, a draft costs as much as the target."""
    cost: DraftCost | None = None
    """Cost of this drafter's network. None: no network, or the policy's packed copy, whose cost is measured."""
    drafts_ahead: bool = True
    """Whether it can continue after its drafts, and go back when rows become shorter. False if it reads the target's
    hidden states, or stores committed tokens."""
    looks_up: bool = False
    """Whether it looks drafts up in texts, without a forward."""
    reads_prompts: bool = True
    """Whether it reads prompts by forwards of its own, which know text alone. Lookups have no forwards."""
    beside: Literal["thread", "elsewhere"] | None = None
    """Where it drafts while the target verifies; None: it drafts between verifications."""
    outlives_changes: bool = False
    """Whether it serves further calls after modules, hooks or plain attributes of the target have changed."""
    learns: bool = False
    """Whether it learns from the target's logits (`learn`)."""
    policy_copies: Sequence[Any] = ()
    """The policy's quantized copies (:class:`~.SelfDrafter`) with which it drafts."""
    learning: LearningStatistics
    """Statistics since `begin`, if it `learns`."""
    forwards: int = 0
    """Draft network forwards since `begin`."""
    made_for: tuple[object, ...] | None = None
    """Result of :meth:`kept_for` when it was made."""
    hangs_in: Thread | None = None
    """A background thread of an earlier call that still uses this drafter."""

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "Drafter":
        """Makes the drafter of a call for `model` that names the strategy.

        Args:
            assistant: the `assistant_model`: a model, a path, a hub id, or None.

        Raises:
            ValueError: the assistant cannot draft.
        """
        return cls()

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[object, ...] | None:
        """Returns the inputs of `make` among these arguments. A later call with an equal tuple reuses the drafter, if
        `model` keeps its structure or the drafter `outlives_changes`; None: never."""
        return None

    @classmethod
    def check_assistant(
        cls, argument: str, assistant: Any, target: PreTrainedModel, config: SpeculativeConfig
    ) -> None:
        """Raises ValueError, naming the `argument`, if `assistant` cannot draft for `target` by its config."""

    @property
    def waited(self) -> float:
        """Seconds of this generation that decoding waited for the drafter's learning or packing."""
        return self.learning.waited if self.learns else 0.0

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Reserves the drafter for one generation; raises ValueError if another generation uses it."""
        token = object()
        if self.__dict__.setdefault("_claim", token) is not token:  # atomic: one of two threads succeeds
            raise ValueError(
                f"drafter={type(self).__name__} is in use: a drafter serves one generation at a time. Make another "
                "one for a generation inside a generation or in another thread, or name the strategy alone."
            )
        try:
            yield
        finally:
            del self._claim

    _claim: object

    def check_length(self, columns: int) -> None:
        """Raises ValueError if the drafter cannot serve rows of `columns` tokens, drafts included."""

    def begin(self, session: DraftSession) -> None:
        """Starts a generation.

        Raises:
            RuntimeError: a background thread of an earlier call still uses the drafter, and would write into this
                call's cache.
        """
        if self.hangs_in is not None and self.hangs_in.is_alive():
            raise RuntimeError("this drafter is still used by a background thread of an earlier call; make a new one")
        self.session = session

    def admit(self, admission: Admission) -> None:
        """Rows have entered."""

    def save_row(self, row: int) -> dict[str, tuple[int, RowKV]] | None:
        """Saves the ended `row` for the next turn of the conversation. Returns, by strategy, the number of
        first columns that the drafter need not compute again, and K/V of its cache; {}: it computes all, or has no
        cache. None: it cannot be saved, because the drafter reads the target's hidden states of the whole text."""
        return {}

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        """Moves the state of rows `source`, now rows `destination`, and the first `columns[i]` columns of a cache:
        active rows come first after others have ended. All are empty if the last rows ended."""

    @abstractmethod
    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        """Drafts up to `draft_length` (γ) tokens for every active row; they may remain unused.

        `noise`: the target's in this round; None: greedy.
        """

    def learn(self, logits: Tensor, verified: Tensor) -> None:
        """Learns from the target's logits on the proposal, before the commit; called if it `learns`.

        Args:
            logits: `[B, γ + 1, V]`, raw; γ as in the proposal, or less. Valid until the target's next forward.
            verified: `[B]` bool, the rows whose proposal was verified; logits of other rows are undefined.
        """

    def observe(self, tokens: Integers, counts: Integers) -> None:
        """Reads the first `counts` `[B]` of `tokens` `[B, n]`, on the host, that a round committed; `session.rows` has
        the committed text. Called after every round, also without drafts of this drafter, and after `admit` with
        first tokens: then `counts` is 0 for rows without one."""

    def end(self) -> None:
        del self.session

    def state_dict(self) -> dict[str, Any]:
        """What it has stored or learned for later generations, for a checkpoint; empty: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`."""

    @property
    def cache_bytes(self) -> int:
        """Peak bytes of the drafter's K/V cache since `begin`."""
        return 0

    @property
    def column_bytes(self) -> float:
        """Bytes of one column of a row in the cache, as far as known before `begin`."""
        return 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's states beside K/V, known before `begin`."""
        return 0

    # ---- transformers' assisted loop, batch 1 ---------------------------------------------------------------------

    def prepare_assisted_decoding(
        self,
        draft_length: int,
        max_length: int,
        do_sample: bool,
        processors: LogitsProcessorList,
        seed: int = 0,
        eos_token_ids: Collection[int] = (),
    ) -> "Drafter":
        """Prepares the drafter for `GenerationMixin._assisted_decoding`, which calls `get_candidates`.

        `max_length` is the largest total length, as in the generation config, and `seed` that of the drafter's noise.
        Drafts end at one of the target's `eos_token_ids`, after which the loop of transformers 5.17 would continue.
        """
        self._solo_arguments = (draft_length, max_length, do_sample, processors, seed, eos_token_ids)
        self._solo_prompt_length = 0
        return self

    def get_candidates(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """Candidates for one row `[1, length + drafted]`, and logits `[1, drafted, vocabulary]` if there are any."""
        draft_length, max_length, do_sample, processors, seed, eos_token_ids = self._solo_arguments
        length = input_ids.shape[1]
        if self._solo_prompt_length == 0:
            rows = Rows(1, max_length + draft_length + 1, input_ids.device)
            pipeline = LogitsPipeline(processors, PrefixView(rows, input_ids), batch_size=1)
            stream = int(stream_keys(seed, torch.zeros(1, dtype=torch.int64)))
            self.begin(DraftSession(rows, pipeline, do_sample, None, keep_logits=self.has_probabilities))
            self.admit(rows.admit([Request(0, input_ids[0], max_length, stream)]))
            self._solo_prompt_length = length
        rows = self.session.rows
        new = length - int(rows.lengths)
        if new:
            rows.write(0, input_ids[:, -new:])
            rows.commit(np.array([length]), None)
            self.observe(input_ids[:, -new:].cpu().numpy(), np.array([new]))
        draft_length = min(draft_length, max_length - length - 1)
        if draft_length < 1:
            return input_ids, None
        samples = do_sample and self.has_probabilities
        noise = RoundNoise(rows.noise_keys(draft_length), self._vocabulary) if samples else None
        proposal = self.propose(draft_length, noise).to(input_ids.device)
        tokens = proposal.tokens[0, : int(proposal.drafted())].tolist()
        drafted = next((count for count, token in enumerate(tokens, start=1) if token in eos_token_ids), len(tokens))
        candidates = torch.cat([input_ids, proposal.tokens[:, :drafted]], dim=1)
        return candidates, proposal.logits[:, :drafted] if proposal.logits is not None and drafted else None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Does nothing: the caller sets the draft length."""

    _vocabulary: int  # of drafters with probabilities


# ---- drafting token by token --------------------------------------------------------------------------------------


Drawing = Callable[[Tensor, RoundNoise | None, int, Draw | None, Seen | None], tuple[Draw, Tensor | None]]
"""As :meth:`~.DraftSession.draw`."""

Forward = Callable[[Tensor, Tensor, int], Tensor]
"""Takes tokens and columns `[B, q]` and the step of a draft, and returns logits `[B, q, V]`."""


@dataclass(frozen=True)
class NetworkDraft:
    """One round's draft loop of a network that reads every drawn token.

    Args:
        tokens: `[B, known + γ]` int64: the newest committed tokens, read first, and places for the drafts.
        columns: `[B, known + γ - 1]` int64, columns of these tokens in the cache, without the last draft.
        known: number of committed tokens among them, at least 1.
        noise: of the round; None: greedy.
        show: called with the step and its tokens `[B, 1]`, for processors that read the text.
        drawn_by: of the session, if the loop can be captured; else None.
        text: `[B, W]` int64, of :class:`~.Seen`, if a draw needs it.
    """

    tokens: Tensor
    columns: Tensor
    known: int
    noise: RoundNoise | None
    draw: Drawing
    show: Callable[[int, Tensor], None]
    drawn_by: Filters | None
    text: Tensor | None = None

    @property
    def draft_length(self) -> int:
        """γ."""
        return self.tokens.shape[1] - self.known

    def run(self, forward: Forward) -> Proposal:
        """Draws one token of every row from each forward, and writes it before the next forward reads it."""
        tokens, scores, processed, drawn = [], [], [], None
        seen = None if self.text is None else Seen(self.text, self.tokens[:, self.known :])
        for step in range(self.draft_length):
            end = self.known + step
            fed = slice(end - 1 if step else 0, end)
            logits = forward(self.tokens[:, fed], self.columns[:, fed], step)[:, -1:]  # [B, 1, V]
            drawn, shown = self.draw(logits, self.noise, step, drawn, seen)
            self.tokens[:, self.known + step, None] = drawn.tokens
            if self.drawn_by is None:
                self.show(step, drawn.tokens)
            tokens.append(drawn.tokens)
            scores.append(drawn.scores)
            if shown is not None:
                processed.append(shown)
        draft_logits = torch.cat(processed, dim=1) if processed else None  # [B, γ, V]
        return Proposal(torch.cat(tokens, dim=1), None, draft_logits, torch.cat(scores, dim=1))
