"""Logits processors of `generate`, applied to rows of different lengths; `stopping.py` does the same for criteria.

transformers applies them to a rectangular batch, one step at a time. Here a step verifies several positions of rows
that have generated different numbers of tokens:

* Processors that look at the scores alone run once over all positions.
* Those whose result for a row depends on that row's prefix and scores alone run on the prefixes that `generate` would
  have shown them, grouped by length: most of transformers' own, and any class with the attribute `prefix_only = True`.
* Users' own of this kind may refuse a prefix that they forbid: they are shown a row's drafts step by step, only as far
  as the target takes them.
* All others may look at other rows or keep state. They need rows that run in step (`in_step.py`), and are called once
  per step with all rows in the caller's order, as in `generate`.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MaxTimeCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .kernels import run_on
from .noise import Draw, RoundNoise, draw, widen
from .rows import Rows
from .verification import Proposal


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
# They keep something for each row of the caller's batch.
_ROW_BOUND = (
    hf.PrefixConstrainedLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
)
# They look at a row's prefix and scores, and never refuse a prefix.
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
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
_KNOWN = {*_SCORES_ONLY, *_ROW_BOUND, *_BY_PREFIX, *_CRITERIA}


def is_known(part: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether it is one of transformers' own that act on each row alone; a subclass may do anything."""
    return type(part) in _KNOWN


def needs_batch(part: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether it may look at other rows than the one it acts on, or keep state from call to call."""
    return not is_known(part) and not getattr(part, "prefix_only", False)


class PrefixView:
    """Rows as `generate` would show them: the caller's padded prompts `input_ids` `[requests, width]`, then the
    output."""

    def __init__(self, rows: Rows, input_ids: Tensor) -> None:
        self.rows = rows
        self._input_ids = input_ids.to(rows.tokens.device)

    def over(self, rows: Rows) -> "PrefixView":
        """The same view of other `rows` of the same requests."""
        return PrefixView(rows, self._input_ids)

    def groups(self, row: Tensor, step: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Groups the positions `step` tokens after the committed ones of `row` (`[n]` int64 each) by the widths of the
        prefixes before them; yields indices into `row` `[m]` int64 and prefixes `[m, width]`."""
        widths = self._input_ids.shape[1] + self.rows.generated[row] + step  # [n]
        for width in widths.unique().tolist():
            member = (widths == width).nonzero().flatten()  # [m]
            yield member, self._prefixes(row[member], width)

    def batch(self, step: int) -> Tensor:
        """Prefixes `[B, width]` of all rows in the caller's order; all have generated equally many tokens."""
        width = self._input_ids.shape[1] + int(self.rows.generated[0]) + step
        return self._prefixes(self.order, width)

    @property
    def order(self) -> Tensor:
        """`[B]` int64: which row holds each request."""
        return self.rows.requests.argsort()

    def _prefixes(self, row: Tensor, width: int) -> Tensor:
        padded, rows = self._input_ids.shape[1], self.rows
        output = torch.arange(width - padded, device=row.device) + rows.prompt_lengths[row, None]  # [n, new]
        return torch.cat([self._input_ids[rows.requests[row]], rows.tokens[row].gather(1, output)], dim=1)


_WARPERS = (
    (hf.TemperatureLogitsWarper, "temperature"),
    (hf.TopKLogitsWarper, "top_k"),
    (hf.TopPLogitsWarper, "top_p"),
    (hf.MinPLogitsWarper, "min_p"),
)


class LogitsPipeline:
    """`generate`'s processors, in its order, over logits of rows of different lengths; `batch_size` is the number of
    rows of the caller's batch, and `may_refuse` says whether one of them may raise on a prefix that it forbids."""

    def __init__(self, processors: LogitsProcessorList, prefixes: PrefixView, batch_size: int) -> None:
        self._processors = processors
        self._filters = Filters.of(processors)
        self._prefixes = prefixes
        self._batch_size = batch_size
        self._looks_at_prefixes = any(type(processor) not in _SCORES_ONLY for processor in processors)
        self.may_refuse = any(type(p) is hf.PrefixConstrainedLogitsProcessor or not is_known(p) for p in processors)

    def over(self, rows: Rows) -> "LogitsPipeline":
        """The same over other `rows` of the same requests, for another thread: copies of transformers' own processors,
        without those that run a user's function or draw random numbers."""
        own = [p for p in self._processors if type(p) in (*_SCORES_ONLY, *_BY_PREFIX)]
        own = [copy.deepcopy(p) for p in own if type(p) is not hf.WatermarkLogitsProcessor]
        return LogitsPipeline(LogitsProcessorList(own), self._prefixes.over(rows), self._batch_size)

    def warpers(self) -> list[float]:
        """Temperature, top-k, top-p and min-p; NaN: unset."""
        found = {type(p): p for p in self._processors}
        return [float(vars(found[kind])[name]) if kind in found else math.nan for kind, name in _WARPERS]

    @classmethod
    def of_warpers(cls, values: Sequence[float], rows: Rows) -> "LogitsPipeline":
        """A pipeline over `rows` of what :meth:`warpers` gave, in `generate`'s order."""
        given = [(kind, value) for (kind, _), value in zip(_WARPERS, values, strict=True) if not math.isnan(value)]
        own = [kind(int(value) if kind is hf.TopKLogitsWarper else value) for kind, value in given]
        return cls(LogitsProcessorList(own), PrefixView(rows, rows.tokens[:, :0]), rows.capacity)

    def __call__(self, logits: Tensor, offset: int = 0) -> Tensor:
        """Processes logits `[B, n, vocabulary]` of positions `offset..offset + n` after the committed tokens."""
        batch, count, _ = logits.shape
        row = torch.arange(batch, device=logits.device).repeat_interleave(count)  # [B * n]
        step = torch.arange(offset, offset + count, device=logits.device).repeat(batch)  # [B * n]
        return self._process(logits.flatten(0, 1), row, step).reshape(logits.shape)

    def draw(self, logits: Tensor, noise: RoundNoise | None, offset: int = 0, want_logprobs: bool = False) -> Draw:
        """Processes logits as above and draws a token at each position. On CUDA one kernel draws, which also applies
        temperature, top-k and min-p where nothing else is set."""
        if self._filters is None or not _is_fused(logits):
            return draw_processed(self(widen(logits), offset), noise, offset, want_logprobs)
        return draw_processed(logits, noise, offset, want_logprobs, self._filters)

    def draw_verified(
        self, logits: Tensor, noise: RoundNoise | None, proposal: Proposal, want_logprobs: bool
    ) -> tuple[Draw, Tensor | None]:
        """As :meth:`draw`, at all positions of a round `[B, γ + 1, vocabulary]`, as far as a row's drafts are the
        tokens drawn; second result as of :meth:`process_verified`, None where no processor refuses any."""
        if not self.may_refuse:
            self._show(proposal)
            return self.draw(logits, noise, want_logprobs=want_logprobs), None

        def is_drawn(step: int, scores: Tensor, draft: Tensor) -> Tensor:
            return draw_processed(scores[:, None], noise, step).tokens[:, 0] == draft

        scores, most = self.process_verified(logits, proposal, is_drawn)
        return draw_processed(scores, noise, 0, want_logprobs), most

    def process_verified(
        self, logits: Tensor, proposal: Proposal, takes: Callable[[int, Tensor, Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Processes the positions of a round, one after the other where a processor may refuse a prefix.

        What raises on a row's own text raises here as in `generate`. A prefix that ends with drafts may be refused, as
        one that goes on after EOS may be: then no token can be drawn after these drafts, and the last of them is the
        row's last token of this round.

        Args:
            logits: `[B, γ + 1, vocabulary]`.
            proposal: the drafts.
            takes: called with a step, its processed scores `[B, vocabulary]` and the drafts there `[B]`; returns `[B]`
                bool, which rows take their draft, and are shown further. None: those that it has a probability of.

        Returns:
            The processed logits, and `[B]` int64: how many drafts each row may take and still draw a token after them.
        """
        self._show(proposal)
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
            taken = (
                scores.gather(1, draft[:, None])[:, 0] > -torch.inf if takes is None else takes(step, scores, draft)
            )
            going = going & taken & (lengths > step)
        return torch.stack(processed, dim=1), most

    def _show(self, proposal: Proposal) -> None:
        """Writes the drafts after the committed tokens, where processors look for them."""
        if self._looks_at_prefixes:
            self._prefixes.rows.write(0, proposal.tokens)

    def attempt(self, scores: Tensor, step: int, shown: Tensor) -> tuple[Tensor, Tensor]:
        """Processes scores `[B, vocabulary]` at the place `step` of the rows `shown` (`[B]` bool).

        Returns the scores, processed where no processor refused the prefix, and `[B]` bool which rows these are.
        """
        processed, passed = scores.clone(), shown.clone()
        row = shown.nonzero().flatten()  # [n]
        if not len(row):
            return processed, passed
        try:
            processed[row] = self._process(scores[row], row, torch.full_like(row, step))
        except Exception:
            for one in row.split(1):  # whose prefix was it?
                try:
                    processed[one] = self._process(scores[one], one, torch.full_like(one, step))
                except Exception:
                    passed[one] = False
        return processed, passed

    def _process(self, scores: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """Processes scores `[n, vocabulary]` at places `step` (`[n]`) after the committed tokens of `row` (`[n]`)."""
        for processor in self._processors:
            if type(processor) in _SCORES_ONLY:
                scores = processor(None, scores)
            elif needs_batch(processor):
                order = self._prefixes.order  # [B]
                scores = processor(self._prefixes.batch(int(step[0])), scores[order])[self._prefixes.rows.requests]
            else:
                scores = self._process_by_prefix(processor, scores, row, step)
        return scores

    def _process_by_prefix(self, processor: LogitsProcessor, scores: Tensor, row: Tensor, step: Tensor) -> Tensor:
        processed = torch.empty_like(scores)
        for member, prefix in self._prefixes.groups(row, step):
            requests = self._prefixes.rows.requests[row[member]]  # [m]
            if isinstance(processor, _ROW_BOUND):
                for i, request in enumerate(requests.tolist()):
                    bound = _bind_to_row(processor, request, self._batch_size)
                    processed[member[i]] = bound(prefix[i : i + 1], scores[member[i]][None])[0]
            else:
                processed[member] = _bind_padding(processor, requests, self._batch_size)(prefix, scores[member])
        return processed


@dataclass(frozen=True)
class Filters:
    """Temperature, top-k and min-p (None: unset). The last two only set the smallest logit that may be drawn."""

    temperature: float = 1.0
    top_k: int | None = None
    min_p: float | None = None

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> "Filters | None":
        """The filters that `processors` are; None where there are others, or these in another order."""
        filters = cls()
        for each in processors:
            # Whether what it filters out cannot be drawn at all.
            bars = isinstance(each, hf.TopKLogitsWarper | hf.MinPLogitsWarper) and each.filter_value == -math.inf
            if type(each) is hf.TemperatureLogitsWarper and filters == cls():
                filters = replace(filters, temperature=each.temperature)
            elif type(each) is hf.TopKLogitsWarper and filters.top_k is filters.min_p is None and bars:
                filters = replace(filters, top_k=each.top_k)
            elif type(each) is hf.MinPLogitsWarper and filters.min_p is None and bars and each.min_tokens_to_keep == 1:
                filters = replace(filters, min_p=each.min_p or None)
            else:
                return None
        return filters

    def floors(self, logits: Tensor) -> Tensor | None:
        """Smallest logits `[n]` float32, divided by the temperature, that may be drawn from `logits` `[n, V]`."""
        bounds = []
        if self.top_k is not None:
            bounds.append(logits.topk(min(self.top_k, logits.shape[1]), sorted=False).values.amin(1).float())
        if self.min_p is not None:
            # p >= min_p * p_max, whatever top-k has left out: the two share their normaliser.
            bounds.append(logits.amax(1).float() + self.temperature * math.log(self.min_p))
        return torch.stack(bounds).amax(0) / self.temperature if bounds else None


def _is_fused(logits: Tensor) -> bool:
    """Whether one kernel draws from these logits."""
    return run_on(logits.device) and logits.dtype != torch.float64


def draw_processed(
    logits: Tensor, noise: RoundNoise | None, first: int = 0, want_logprobs: bool = False, filters: Filters = Filters()
) -> Draw:
    """As :func:`~spec_trl.generation.engine.noise.draw`, on CUDA by one kernel, which alone applies `filters`."""
    if not _is_fused(logits):
        return draw(logits, noise, first, want_logprobs)
    from .kernels.gumbel_sampler import fused_draw  # imports Triton

    batch, count, _ = logits.shape
    keys = None if noise is None else noise.keys[:, first : first + count].reshape(-1)  # [B * n]
    floors = filters.floors(logits.flatten(0, 1))  # [B * n]
    drawn = fused_draw(logits.flatten(0, 1), keys, filters.temperature, floors)  # of [B * n] each
    tokens, scores, logprobs = (part.view(batch, count) for part in drawn)
    return Draw(tokens, scores, logprobs if want_logprobs else None)


def _bind_to_row(processor: LogitsProcessor, request: int, batch_size: int) -> LogitsProcessor:
    """The processor as it acts on one row of the caller's batch."""
    bound = copy.copy(processor)
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        bound._prefix_allowed_tokens_fn = lambda _, prefix: allowed(request, prefix)
    elif isinstance(processor, hf.EncoderRepetitionPenaltyLogitsProcessor):
        copies = batch_size // processor.encoder_input_ids.shape[0]  # num_return_sequences
        bound.encoder_input_ids = processor.encoder_input_ids[request // copies][None]
    elif isinstance(processor, hf.EncoderNoRepeatNGramLogitsProcessor):
        prompt = request // (batch_size // processor.batch_size)
        bound.batch_size, bound.generated_ngrams = 1, processor.generated_ngrams[prompt : prompt + 1]
    return bound


def _bind_padding(processor: LogitsProcessor, requests: Tensor, batch_size: int) -> LogitsProcessor:
    """The processor with the padding of `requests` (`[n]`), which transformers >= 5.23 keeps for the caller's rows."""
    if not isinstance(processor, hf.RepetitionPenaltyLogitsProcessor):
        return processor
    padding = processor.prompt_ignore_length
    if not isinstance(padding, Tensor):
        return processor
    bound = copy.copy(processor)
    bound.prompt_ignore_length = padding.to(requests.device)[requests // (batch_size // len(padding))]  # [n]
    return bound
