"""Applies `generate`'s logits processors to rows of different lengths.

transformers applies them to a rectangular batch, one step at a time. Here a step verifies several positions of rows
that have generated different numbers of tokens:

* Processors that read only the scores, the number of tokens before a position, or their set run once over all
  positions.
* Processors whose result for a row depends only on its prefix and scores run on the prefixes of `generate`, grouped by
  length: some of transformers' classes, and any class with the attribute `prefix_only = True`.
* A user's class of this kind may raise on a forbidden prefix: a row's drafts are shown to it step by step, as far as
  the target accepts them.
* All others may read other rows or have state: `lockstep.py` shows them the prefixes of `generate`.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MaxTimeCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..cuda.kernels import run_on
from ..kv.memory import sent
from ..rows import PrefixView, Rows
from .accept import Proposal
from .filters import keep_top_p
from .noise import Draw, RoundNoise, draw, widen
from .penalty import PenalisedText, Seen, ignored_by, penalise


_SCORES_ONLY = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.TopHLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
)
# They store data per row of the caller's batch.
_ROW_BOUND = (
    hf.PrefixConstrainedLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
)
# They read a row's prefix and scores, and never raise on a prefix.
_BY_PREFIX = (
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.WatermarkLogitsProcessor,
)
# Classes that read only the length of a prefix, with the lengths that they act on.
_ACTS_ON: dict[type, Callable[[Any, int], bool]] = {
    hf.MinLengthLogitsProcessor: lambda rule, width: width < rule.min_length,
    hf.MinNewTokensLengthLogitsProcessor: lambda rule, width: width - rule.prompt_length_to_skip < rule.min_new_tokens,
    hf.ForcedBOSTokenLogitsProcessor: lambda rule, width: width == 1,
    hf.ForcedEOSTokenLogitsProcessor: lambda rule, width: width == rule.max_length - 1,
    hf.SuppressTokensAtBeginLogitsProcessor: lambda rule, width: width == rule.begin_index,
}
_FILTERS = (hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)
_FORBID_EOS = hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
_KNOWN = {*_SCORES_ONLY, *_ROW_BOUND, *_BY_PREFIX, *_CRITERIA}


def is_known(part: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether `part` is a class of transformers that acts on rows separately; a subclass may do anything."""
    return type(part) in _KNOWN


def needs_batch(part: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether `part` may read other rows than its own, or have state between calls."""
    return not is_known(part) and not getattr(part, "prefix_only", False)


@dataclass(frozen=True)
class Filters:
    """Temperature, top-k, top-p and min-p (None: unset). The last three only set the smallest logit that may be
    drawn. `penalty`: of repetition, applied before them by the owner of the text."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    penalty: float | None = None

    @classmethod
    def of(cls, processors: Sequence[LogitsProcessor]) -> "Filters | None":
        """The filters in `processors`; None: there are other processors, or another order."""
        filters = cls()
        for processor in processors:
            # bars: filtered tokens get -inf, not another value. alone: all but one token may be filtered.
            bars = isinstance(processor, _FILTERS) and processor.filter_value == -math.inf
            alone = bars and processor.min_tokens_to_keep == 1
            if type(processor) is hf.TemperatureLogitsWarper and filters == cls():
                filters = replace(filters, temperature=processor.temperature)
            elif type(processor) is hf.TopKLogitsWarper and filters == cls(filters.temperature) and bars:
                filters = replace(filters, top_k=processor.top_k)
            elif (
                type(processor) is hf.TopPLogitsWarper
                and filters.top_p is filters.min_p is None
                and alone
                and 0 < processor.top_p < 1
            ):
                filters = replace(filters, top_p=processor.top_p)
            elif type(processor) is hf.MinPLogitsWarper and filters.min_p is None and alone:
                filters = replace(filters, min_p=processor.min_p or None)
            else:
                return None
        return filters

    def floors(self, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Smallest logits `[n]` float32, divided by the temperature, that may be drawn from `logits` `[n, V]`; and the
        first token (`[n]` int32; None: of all) that may be drawn among those that just equal it."""
        floors = first = None
        if self.top_k is not None:
            best = logits.topk(min(self.top_k, logits.shape[1]), sorted=False).values
            floors = best.amin(1).float() / self.temperature
        if self.top_p is not None:
            from ..cuda.kernels.sampling import top_p_floors  # imports Triton

            floors, first = top_p_floors(logits, self.top_p, self.temperature, floors)
        if self.min_p is not None:
            # p >= min_p * p_max does not depend on top-k and top-p: both sides have the same normaliser.
            least = (logits.amax(1).float() + self.temperature * math.log(self.min_p)) / self.temperature
            if first is not None and floors is not None:
                first = first.masked_fill(least > floors, 0)
            floors = least if floors is None else torch.maximum(least, floors)
        return floors, first


_NO_FILTERS = Filters()
_WARPERS = (
    (hf.TemperatureLogitsWarper, "temperature"),
    (hf.TopKLogitsWarper, "top_k"),
    (hf.TopPLogitsWarper, "top_p"),
    (hf.MinPLogitsWarper, "min_p"),
)


class LogitsPipeline:
    """`generate`'s processors, in its order, over logits of rows of different lengths; `batch_size` is the number of
    rows of the caller's batch.

    Attributes:
        only_filters: the processors, if only a repetition penalty, temperature, top-k, top-p and min-p; else None.
        penalised: the text that draws read, where `only_filters` has a penalty; None: they read more, or no text.
        may_refuse: whether a processor may raise on a prefix that it forbids.
        keeps_support: whether draws with log-probabilities also say which tokens the processors kept.
    """

    keeps_support = False

    def __init__(self, processors: LogitsProcessorList, prefixes: PrefixView, batch_size: int) -> None:
        self._processors = processors
        # The kernel that draws applies as many of the last ones as it can.
        first = 0
        while (filters := Filters.of(processors[first:])) is None:
            first += 1
        self._filters, self._before_filters = filters, processors[:first]
        self.only_filters = None if self._before_filters else filters
        self.penalised: PenalisedText | None = None
        if list(map(type, self._before_filters)) == [hf.RepetitionPenaltyLogitsProcessor]:
            self.only_filters = replace(filters, penalty=processors[0].penalty)
            self.penalised = PenalisedText(processors[0], prefixes, batch_size)
        self._prefixes, self._batch_size = prefixes, batch_size
        self._eos: dict[LogitsProcessor, Tensor] = {}  # [vocabulary] bool
        self._looks_at_prefixes = not set(map(type, processors)) <= {*_SCORES_ONLY}
        self.may_refuse = not set(map(type, processors)) <= _KNOWN - {hf.PrefixConstrainedLogitsProcessor}
        self._is_float32 = any(map(needs_batch, processors))  # they are shown what generate shows, in float32

    def for_drafts(self) -> "LogitsPipeline":
        """A pipeline without processors that must not see drafts."""
        kept = LogitsProcessorList([each for each in self._processors if not needs_batch(each)])
        return LogitsPipeline(kept, self._prefixes, self._batch_size)

    def over(self, rows: Rows) -> "LogitsPipeline":
        """A pipeline over other `rows` of the same requests, for another thread: copies of transformers' processors,
        without those that run a user's function or draw random numbers."""
        usable = {*_SCORES_ONLY, *_BY_PREFIX} - {hf.WatermarkLogitsProcessor}
        copies = [copy.deepcopy(processor) for processor in self._processors if type(processor) in usable]
        return LogitsPipeline(LogitsProcessorList(copies), self._prefixes.over(rows), self._batch_size)

    def warpers(self) -> list[float]:
        """Temperature, top-k, top-p and min-p; NaN: unset."""
        by_type = {type(processor): processor for processor in self._processors}
        return [float(vars(by_type[kind])[name]) if kind in by_type else math.nan for kind, name in _WARPERS]

    @classmethod
    def of_warpers(cls, values: Sequence[float], rows: Rows) -> "LogitsPipeline":
        """A pipeline over `rows` of the values of :meth:`warpers`, in `generate`'s order."""
        warpers = LogitsProcessorList()
        for (kind, _), value in zip(_WARPERS, values, strict=True):
            if not math.isnan(value):
                warpers.append(kind(int(value) if kind is hf.TopKLogitsWarper else value))
        return cls(warpers, PrefixView(rows, rows.tokens[:, :0]), rows.capacity)

    def __call__(
        self,
        logits: Tensor,
        offset: int = 0,
        rows: Sequence[int] | None = None,
        processors: Sequence[LogitsProcessor] | None = None,
        seen: Seen | None = None,
    ) -> Tensor:
        """Processes logits `[B, n, vocabulary]` of positions `offset..offset + n` after the committed tokens of
        `rows` (B of them; None: all), with the first `processors` (None: all). `seen`: if a repetition penalty is the
        first processor, and no other reads text."""
        batch, count, _ = logits.shape
        chosen = self._processors if processors is None else processors
        if seen is not None:
            logits, chosen = penalise(logits, chosen[0].penalty, seen, offset), chosen[1:]
        row, step = list[int](), list[int]()
        if self._looks_at_prefixes and seen is None:
            row = [row for row in (range(batch) if rows is None else rows) for _ in range(count)]
            step = list(range(offset, offset + count)) * batch
        return self._process(chosen, logits.flatten(0, 1), row, step).view(logits.shape)

    def draw(
        self,
        logits: Tensor,
        noise: RoundNoise | None,
        offset: int = 0,
        want_logprobs: bool = False,
        rows: Sequence[int] | None = None,
        seen: Seen | None = None,
    ) -> Draw:
        """Processes logits as above and draws a token at each position, with the noise of the same rows. On CUDA one
        kernel draws, and applies final temperature, top-k, top-p and min-p."""
        keeps = want_logprobs and self.keeps_support
        if keeps or not _is_fused(logits):
            scores = self(widen(logits), offset, rows, seen=seen)
            drawn = draw(scores, noise, offset, want_logprobs)
            return replace(drawn, kept=scores > -math.inf) if keeps else drawn
        if self._before_filters:
            logits = self(logits if seen else widen(logits), offset, rows, self._before_filters, seen)
        return draw_processed(logits, noise, offset, want_logprobs, self._filters)

    def draw_verified(self, logits: Tensor, noise: RoundNoise | None, proposal: Proposal, want_logprobs: bool) -> Draw:
        """Like :meth:`draw`, at all positions of a round `[B, γ + 1, vocabulary]`, as far as a row's drafts equal the
        drawn tokens; `most` as in :meth:`process_verified`, None if no processor refuses prefixes."""
        if not self.may_refuse:
            seen = None if self.penalised is None else Seen(self.penalised.of_rows(), proposal.tokens)
            if self._looks_at_prefixes and seen is None:
                self._prefixes.rows.write(0, proposal.tokens)
            return self.draw(logits, noise, want_logprobs=want_logprobs, seen=seen)

        def is_drawn(step: int, scores: Tensor, draft: Tensor) -> Tensor:
            return draw_processed(scores[:, None], noise, step).tokens[:, 0] == draft

        scores, most = self.process_verified(logits, proposal, is_drawn)
        kept = scores > -math.inf if want_logprobs and self.keeps_support else None
        return replace(draw_processed(scores, noise, 0, want_logprobs), most=most, kept=kept)

    def process_verified(
        self, logits: Tensor, proposal: Proposal, takes: Callable[[int, Tensor, Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Processes the positions of a round, one after the other where a processor may refuse a prefix.

        An error on a row's committed text is raised, as in `generate`. A prefix that ends with drafts may be refused,
        such as one that continues after EOS: then no token is drawn after these drafts, and the last of them is the
        row's last token of this round.

        Args:
            logits: `[B, γ + 1, vocabulary]`.
            takes: called with a step, its processed scores `[B, vocabulary]` and the drafts there `[B]`; returns `[B]`
                bool, the rows that accept their draft and are processed further. None: rows whose draft has a
                probability above 0 go on.

        Returns:
            The processed logits, and `[B]` int64: most drafts that a row may accept and still draw a token after.
        """
        if self._looks_at_prefixes:  # which read drafts after the committed tokens
            self._prefixes.rows.write(0, proposal.tokens)
        if not self.may_refuse:
            return self(widen(logits)), proposal.drafted()
        drafts = F.pad(proposal.tokens, (0, 1))  # [B, γ + 1], the last one is no draft
        most = lengths = proposal.drafted()  # [B]
        going = torch.ones_like(lengths, dtype=torch.bool)  # [B]
        processed: list[Tensor] = []
        for step in range(logits.shape[1]):
            scores = widen(logits[:, step])  # [B, V]
            if step == 0:
                scores = self(scores[:, None])[:, 0]
            else:
                scores, passed = self.attempt(scores, step, going)
                most = most.where(passed | ~going, step - 1)
                going = passed
            processed.append(scores)
            draft = drafts[:, step]  # [B]
            of_draft = scores.gather(1, draft[:, None])[:, 0]  # [B]
            taken = of_draft > -torch.inf if takes is None else takes(step, scores, draft)
            going = going & taken & (lengths > step)
        return torch.stack(processed, dim=1), most

    def attempt(self, scores: Tensor, step: int, shown: Tensor) -> tuple[Tensor, Tensor]:
        """Processes scores `[B, vocabulary]` at the place `step` of the rows `shown` (`[B]` bool). Returns the scores,
        processed where no processor refused the prefix, and `[B]` bool: those rows."""
        processed, passed = [*scores], shown.clone()  # [V] each
        if not (rows := shown.nonzero().flatten().tolist()):
            return scores, passed
        try:
            found = self._process(self._processors, scores[rows], rows, [step] * len(rows))
            for row, of_row in zip(rows, found, strict=True):
                processed[row] = of_row
        except Exception:
            for row in rows:  # find the prefix that raised
                try:
                    processed[row] = self._process(self._processors, scores[row][None], [row], [step])[0]
                except Exception:
                    passed[row] = False
        return torch.stack(processed), passed

    def _process(
        self, processors: Sequence[LogitsProcessor], scores: Tensor, row: Sequence[int], step: Sequence[int]
    ) -> Tensor:
        """Processes scores `[n, vocabulary]` at places `step` after the committed tokens of `row`, n each."""
        widths = self._prefixes.widths(row, step) if self._looks_at_prefixes else []
        logits = scores = scores.float() if self._is_float32 else scores  # which must not be overwritten
        for processor in processors:
            if type(processor) is hf.TopPLogitsWarper:
                scores = keep_top_p(processor, scores, out=None if scores is logits else scores)
            elif type(processor) in _SCORES_ONLY:
                scores = processor(None, scores)
            elif needs_batch(processor):
                view = self._prefixes
                scores = processor(view.batch(step[0]), scores[view.order])[view.rows.requests]
            elif type(processor) in _ACTS_ON:
                scores = self._process_by_length(processor, scores, widths)
            elif type(processor) is hf.ExponentialDecayLengthPenalty:
                scores = _decay(processor, scores, widths)
            elif type(processor) is hf.RepetitionPenaltyLogitsProcessor:
                text = PenalisedText(processor, self._prefixes, self._batch_size)
                seen = Seen(text.before(row, widths), scores.new_empty(len(row), 0, dtype=torch.int64))
                scores = penalise(scores[:, None], processor.penalty, seen)[:, 0]
            else:
                scores = self._process_by_prefix(processor, scores, row, widths)
        missing = logits.shape[-1] - scores.shape[-1]  # as in generate, scores of any dtype, or of the first words
        return F.pad(widen(scores), (0, missing), value=-math.inf) if missing else widen(scores)

    def _process_by_length(self, processor: LogitsProcessor, scores: Tensor, widths: Sequence[int]) -> Tensor:
        acts = [_ACTS_ON[type(processor)](processor, width) for width in widths]
        if not any(acts):
            return scores
        if isinstance(processor, _FORBID_EOS):  # transformers compares the vocabulary with EOS each time
            if processor not in self._eos:
                vocabulary = torch.arange(scores.shape[-1], device=scores.device)
                self._eos[processor] = torch.isin(vocabulary, processor.eos_token_id)
            processed = scores.masked_fill(self._eos[processor], -math.inf)
        else:
            processed = processor(scores.new_empty(0, widths[acts.index(True)], dtype=torch.int64), scores)
        return processed if all(acts) else processed.where(self._prefixes.on_device(acts)[:, None] > 0, scores)

    def _process_by_prefix(
        self, processor: LogitsProcessor, scores: Tensor, row: Sequence[int], widths: Sequence[int]
    ) -> Tensor:
        view, processed = self._prefixes, [*scores]  # [V] each
        for member, prefix in view.groups(row, widths):
            if isinstance(processor, _ROW_BOUND):
                for i, place in enumerate(member):
                    bound = _bind_to_row(processor, view.rows.indices[row[place]], self._batch_size)
                    processed[place] = bound(prefix[i : i + 1], scores[place][None])[0]
            else:
                bound, at = processor, view.on_device(member)  # at: [m]
                if isinstance(processor, hf.RepetitionPenaltyLogitsProcessor):
                    bound = copy.copy(processor)
                    rows = view.on_device([row[i] for i in member])  # [m]
                    bound.prompt_ignore_length = ignored_by(processor, view, self._batch_size, rows)
                for place, found in zip(member, bound(prefix, scores[at]), strict=True):
                    processed[place] = found
        return torch.stack(processed)


def _is_fused(logits: Tensor) -> bool:
    return run_on(logits.device) and logits.dtype != torch.float64


def draw_processed(
    logits: Tensor,
    noise: RoundNoise | None,
    first: int = 0,
    want_logprobs: bool = False,
    filters: Filters = _NO_FILTERS,
) -> Draw:
    """Like :func:`~.draw`; on CUDA by one kernel, which applies `filters`."""
    if not _is_fused(logits):
        return draw(logits, noise, first, want_logprobs)
    from ..cuda.kernels.sampling import fused_draw  # imports Triton

    batch, count, _ = logits.shape
    keys = None if noise is None else noise.keys[:, first : first + count].reshape(-1)  # [B * n]
    floors = filters.floors(logits.flatten(0, 1))  # [B * n] each
    drawn = fused_draw(logits.flatten(0, 1), keys, filters.temperature, *floors)  # of [B * n] each
    tokens, scores, logprobs = (part.view(batch, count) for part in drawn)
    return Draw(tokens, scores, logprobs if want_logprobs else None)


def _bind_to_row(processor: LogitsProcessor, request: int, batch_size: int) -> LogitsProcessor:
    bound = copy.copy(processor)
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed, copies = processor._prefix_allowed_tokens_fn, processor._num_beams
        bound._num_beams = 1
        bound._prefix_allowed_tokens_fn = lambda _, prefix: allowed(request // copies, prefix)
    elif isinstance(processor, hf.EncoderRepetitionPenaltyLogitsProcessor):
        copies = batch_size // processor.encoder_input_ids.shape[0]  # num_return_sequences
        bound.encoder_input_ids = processor.encoder_input_ids[request // copies][None]
    elif isinstance(processor, hf.EncoderNoRepeatNGramLogitsProcessor):
        prompt = request // (batch_size // processor.batch_size)
        bound.batch_size, bound.generated_ngrams = 1, processor.generated_ngrams[prompt : prompt + 1]
    return bound


def _decay(processor: hf.ExponentialDecayLengthPenalty, scores: Tensor, widths: Sequence[int]) -> Tensor:
    """Like transformers, at places `[n]` of different `widths` of the prefixes before them."""
    late = [max(width - processor.regulation_start, 0) for width in widths]
    if not any(late):
        return scores
    factors = torch.tensor([processor.regulation_factor**steps - 1 for steps in late], dtype=scores.dtype)
    processor.eos_token_id = ids = processor.eos_token_id.to(scores.device)  # [ids]
    eos = scores[:, ids]  # [n, ids]
    more = eos.abs() * sent(factors, scores.device)[:, None]
    return scores.index_copy(1, ids, eos + more.masked_fill(~eos.isfinite(), 0.0))
