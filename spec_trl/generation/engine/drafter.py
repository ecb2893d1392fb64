"""A drafter proposes tokens; its proposals can never change an output. And the loop of networks that draft."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ...scheduling.acceptance import MAX_DRAFT_LENGTH
from ..configuration import SpeculativeConfig
from .accept import Integers, Proposal
from .cache import RaggedCache
from .noise import Draw, RoundNoise, draw, stream_keys, widen
from .processors import Filters, LogitsPipeline, draw_processed
from .rows import Admission, PrefixView, Request, Rows
from .statistics import LearningStatistics


if TYPE_CHECKING:
    from .runner import EagerRunner


@dataclass(frozen=True)
class DraftSession:
    """What a drafter sees of the generation it drafts for.

    Args:
        rows: the rows in flight.
        pipeline: the target's processors: a drafter that samples applies them too (ER: the drafter uses the target's
            temperature, top-k and top-p).
        do_sample: False: greedy.
        target: the target's runner; None inside transformers' loop, where the target has another cache.
        keep_logits: whether proposals must carry their logits (rejection verification).
        most_drafted: largest γ of a round.
        spend: takes seconds from the control's exploration budget, for learning; False: it holds less.
        tail: of a drafter that runs ahead, without `target`: the cache where a copy of the target reads the target's
            K/V and writes the copy's; None: it computes both.
    """

    rows: Rows
    pipeline: LogitsPipeline
    do_sample: bool
    target: "EagerRunner | None"
    keep_logits: bool
    most_drafted: int = MAX_DRAFT_LENGTH
    spend: Callable[[float], bool] = lambda _: True
    tail: RaggedCache | None = None

    @property
    def most_columns(self) -> list[int]:
        """Columns of each row, drafts included, when there were most."""
        return [length + self.most_drafted for length in self.rows.most]

    @property
    def drawn_by(self) -> Filters | None:
        """All that :meth:`draw` depends on besides logits and noise; None: also the text, or it keeps logits."""
        return None if self.keep_logits else self.pipeline.only_filters

    def draw(
        self, logits: Tensor, noise: RoundNoise | None, step: int, previous: Draw | None = None
    ) -> tuple[Draw, Tensor | None]:
        """Draws each row's draft token at `step` as the target would from the same logits `[B, 1, V]`; returns the
        draw and, where proposals must carry them, the processed logits `[B, 1, V]`.

        A row that processors leave no token, or whose prefix they refuse, has a score of -inf: it drafts up to there,
        and is not shown to processors again (`previous` is the draw at the step before).
        """
        if not self.pipeline.may_refuse:
            if not self.keep_logits:
                return self.pipeline.draw(logits, noise, step), None
            processed = self.pipeline(widen(logits), step).clone()  # a runner's next forward may overwrite its logits
            return draw(processed, noise, step), processed
        shown = self.rows.lengths > 0 if previous is None else previous.scores[:, 0] > -torch.inf  # [B]
        scores, passed = self.pipeline.attempt(widen(logits[:, 0]), step, shown)
        drawn = draw_processed(scores[:, None], noise, step)
        drawn = replace(drawn, scores=drawn.scores.masked_fill(~passed[:, None], -torch.inf))
        return drawn, scores[:, None] if self.keep_logits else None


@dataclass(frozen=True)
class DraftCost:
    """What one forward of a drafting network costs, for the roofline: the bytes of the weights it reads, a borrowed
    head included, and the FLOP per row. At most `tokens` draft tokens per row come out of it."""

    weight_bytes: float
    dense_flops: float
    tokens: int = 1


class Drafter(CandidateGenerator):
    """Proposes draft tokens for a ragged batch, and for batch 1 in transformers' assisted loop.

    The engine calls `begin` once per generation, then in each round `admit` for rows that came in, `move` for rows
    that closed a gap, and `propose`. Rows come in without their first tokens, which `observe` passes. Any exception
    out of these drops the drafter for the rest of the generation.
    """

    strategy: str = "custom"
    """The `assistant_strategy` that names it, if it is registered; statistics go by this name."""
    assistant: Literal["none", "optional", "required"] = "none"
    """Whether it drafts with what is passed as `assistant_model`."""
    has_probabilities: bool
    """Whether proposals can carry draft logits, which rejection verification needs."""
    uses_pool: bool = False
    """Whether its K/V lies in pages where the target's does, and else in whole rows."""
    max_rows: int = sys.maxsize
    """With more rows in flight a draft costs what the target costs; such rounds decode autoregressively."""
    cost: DraftCost | None = None
    """Of a network other than the policy's packed copy, whose cost a profile knows."""
    drafts_ahead: bool = True
    """Whether it can go on drafting after its drafts, and go back when its rows have become shorter. Not where it
    drafts from what the target has computed, or stores what was committed."""
    looks_up: bool = False
    """Whether it looks its drafts up in texts, which costs no forward."""
    outlives_changes: bool = False
    """Whether it serves further calls after modules, hooks or plain attributes of the target have changed."""
    learns: bool = False
    """Whether it wants to see the target's logits (`learn`)."""
    learning: LearningStatistics
    """Since `begin`, where it `learns`."""
    forwards: int = 0
    """Draft network forwards since `begin`."""
    made_for: tuple[object, ...] | None = None
    """What :meth:`kept_for` returned when it was made."""
    hangs_in: Thread | None = None
    """The thread of an earlier generation that was given up while in this drafter."""

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "Drafter":
        """Makes the drafter of a call for `model` that names the strategy.

        Args:
            model: the target.
            assistant: what is passed as `assistant_model`: a model, a path, a hub id, or None.
            config: options of the call.

        Raises:
            ValueError: the assistant cannot draft.
        """
        return cls()

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[object, ...] | None:
        """What `make` reads of these arguments. A later call with an equal tuple gets the same drafter, if `model`
        keeps its structure or the drafter `outlives_changes`; None: each call makes a new one."""
        return None

    @classmethod
    def check_assistant(
        cls, argument: str, assistant: Any, target: PreTrainedModel, config: SpeculativeConfig
    ) -> None:
        """Raises ValueError, naming the `argument`, where `assistant` cannot draft for `target`, as far as its config
        tells."""

    @property
    def stood(self) -> float:
        """Seconds in which decoding stood still because it learned or was packed; during a generation."""
        return self.learning.waited if self.learns else 0.0

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Reserves the drafter for one generation; raises ValueError where another generation has it."""
        token = object()
        if self.__dict__.setdefault("_claim", token) is not token:  # atomic: of two threads one gets it
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
        """Raises ValueError where it cannot draft for rows of `columns` tokens, drafts included."""

    def begin(self, session: DraftSession) -> None:
        """Starts a generation.

        Raises:
            RuntimeError: another thread is still in it. It would go on in this generation's cache.
        """
        if self.hangs_in is not None and self.hangs_in.is_alive():
            raise RuntimeError("a thread of an earlier generation hangs in it")
        self.session = session

    def admit(self, admission: Admission) -> None:
        """Rows came in."""

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        """Rows have ended. Rows `source` are now rows `destination`, so that the active ones come first: state per row
        moves along, and so do its first `columns[i]` of a cache. All are empty where the last rows ended."""

    @abstractmethod
    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        """Drafts up to `draft_length` (γ) tokens for every active row of the session; another drafter's may be taken.

        `noise` is the noise that the target samples with in this round; None: greedy.
        """

    def learn(self, logits: Tensor, verified: Tensor) -> None:
        """Learns from the target's logits on the proposal, before anything is committed; called where it `learns`.

        Args:
            logits: `[B, γ + 1, V]`, raw; γ as in the proposal, or less. Valid until the target's next forward.
            verified: `[B]` bool, the rows whose proposal was verified; the logits of the others mean nothing.
        """

    def observe(self, tokens: Integers, kept: Integers) -> None:
        """A round has committed the first `kept` `[B]` of `tokens` `[B, n]` of each row, on the host; `session.rows`
        shows which drafts survived. Also called where the drafter did not draft, or another's drafts were taken, and
        after `admit` with first tokens: then `kept` is 0 for rows without one."""

    def end(self) -> None:
        """Lets go of the session: the generation is over."""
        del self.session

    @property
    def cache_bytes(self) -> int:
        """Most bytes of the drafter's K/V cache since `begin`."""
        return 0

    @property
    def column_bytes(self) -> float:
        """Bytes of one column of a row in it, as far as they are known before `begin`."""
        return 0.0

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of a row that it keeps beside K/V, known before `begin`."""
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
        """Makes the drafter ready for `GenerationMixin._assisted_decoding`, which calls `get_candidates`.

        `max_length` is the largest total length, as in the generation config, and `seed` that of the drafter's own
        noise. Drafts end with one of the target's `eos_token_ids`: that loop goes on after it in transformers 5.17.
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
        """The draft length is the caller's business."""

    _vocabulary: int  # of drafters with probabilities


# ---- drafting token by token --------------------------------------------------------------------------------------


Drawing = Callable[[Tensor, RoundNoise | None, int, Draw | None], tuple[Draw, Tensor | None]]
"""As :meth:`~spec_trl.generation.engine.drafter.DraftSession.draw`."""

Forward = Callable[[Tensor, Tensor, int], Tensor]
"""Takes tokens and columns `[B, q]` and the step of a draft, and returns logits `[B, q, V]`."""


@dataclass(frozen=True)
class NetworkDraft:
    """One round's loop of a network, which is fed every token that was drawn.

    Args:
        tokens: `[B, known + γ]` int64, the newest committed tokens, which are fed first, and places for the drafts.
        columns: `[B, known + γ - 1]` int64, where they lie in the cache; nobody feeds the last draft.
        known: how many committed tokens there are, at least 1.
        noise: of the round; None: greedy.
        draw: of the session.
        show: called with the step and its tokens `[B, 1]`, for processors that look at the text.
        drawn_by: all that a draw depends on besides logits and noise, where these are numbers, and no text has to be
            shown nor logits returned: such loops can be captured. None: it is more than that.
    """

    tokens: Tensor
    columns: Tensor
    known: int
    noise: RoundNoise | None
    draw: Drawing
    show: Callable[[int, Tensor], None]
    drawn_by: Filters | None

    @property
    def draft_length(self) -> int:
        """γ."""
        return self.tokens.shape[1] - self.known

    def run(self, forward: Forward) -> Proposal:
        """Drafts: draws one token of every row from each forward, and writes it before the next one reads it."""
        tokens, scores, processed, drawn = [], [], [], None
        for step in range(self.draft_length):
            end = self.known + step
            fed = slice(end - 1 if step else 0, end)
            logits = forward(self.tokens[:, fed], self.columns[:, fed], step)[:, -1:]  # [B, 1, V]
            drawn, shown = self.draw(logits, self.noise, step, drawn)
            self.tokens[:, self.known + step, None] = drawn.tokens
            if self.drawn_by is None:
                self.show(step, drawn.tokens)
            tokens.append(drawn.tokens)
            scores.append(drawn.scores)
            if shown is not None:
                processed.append(shown)
        draft_logits = torch.cat(processed, dim=1) if processed else None  # [B, γ, V]
        return Proposal(torch.cat(tokens, dim=1), None, draft_logits, torch.cat(scores, dim=1))
