"""Logits processors and stopping criteria of `generate`, applied to rows of different lengths.

transformers applies them to a rectangular batch, one step at a time. Here a step verifies several positions of rows
that have generated different numbers of tokens. Processors that look at the scores alone run once over all of them;
the others run on the prefixes that `generate` would have shown them, grouped by length.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .kernels import run_on
from .rows import Rows
from .sampling import Draw, RoundNoise, draw, widen


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
# They keep something for each row of the caller's batch, by its index there.
_ROW_BOUND = (
    hf.PrefixConstrainedLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.EncoderNoRepeatNGramLogitsProcessor,
)
_UNSERVED = (hf.SynthIDTextWatermarkLogitsProcessor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor)


class PrefixView:
    """Rows as `generate` would show them: prompts left-padded to the caller's width, then the output.

    Args:
        rows: the rows in flight.
        padded_width: width of the caller's `input_ids`.
        pad_token_id: what fills the left.
    """

    def __init__(self, rows: Rows, padded_width: int, pad_token_id: int) -> None:
        self.rows = rows
        self._padded_width = padded_width
        self._pad = pad_token_id

    def groups(self, offset: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For positions `offset..offset + count` behind the committed tokens of every row, groups of equal length.

        Yields:
            Row `[n]`, step within `0..count` `[n]` and prefix `[n, width]` of each member; a member's prefix ends
            before its own position.
        """
        rows = self.rows
        device = rows.tokens.device
        steps = torch.arange(offset, offset + count, device=device)  # [count]
        widths = self._padded_width + rows.generated[:, None] + steps  # [B, count]
        for width in widths.unique().tolist():
            row, step = (widths == width).nonzero(as_tuple=True)  # [n], [n]
            yield row, step, self._prefixes(row, width)

    def _prefixes(self, row: Tensor, width: int) -> Tensor:
        padding = self._padded_width - self.rows.prompt_lengths[row]  # [n]
        column = torch.arange(width, device=row.device) - padding[:, None]  # [n, width]
        prefix = self.rows.tokens[row].gather(1, column.clamp(min=0))  # [n, width]
        return prefix.masked_fill(column < 0, self._pad)


class LogitsPipeline:
    """`generate`'s processors over `[B, n, vocabulary]` logits of ragged rows.

    Args:
        processors: in the order in which `generate` applies them.
        prefixes: the rows they belong to.
        batch_size: rows of the caller's batch.
    """

    def __init__(self, processors: LogitsProcessorList, prefixes: PrefixView, batch_size: int) -> None:
        for processor in processors:
            if isinstance(processor, _UNSERVED):
                raise ValueError(
                    f"{type(processor).__name__} keeps state from step to step, which speculation cannot rewind. "
                    "Remove it, or generate without `assistant_strategy`."
                )
        self._processors = processors
        self._filters = Filters.of(processors)
        self._prefixes = prefixes
        self._batch_size = batch_size

    def __call__(self, logits: Tensor, offset: int = 0) -> Tensor:
        """Processes logits `[B, n, vocabulary]` of positions `offset..offset + n` behind the committed tokens."""
        for processor in self._processors:
            if type(processor) in _SCORES_ONLY:
                flat = logits.reshape(-1, logits.shape[-1])  # [B * n, V]
                logits = processor(None, flat).view(logits.shape)
            else:
                logits = self._process_by_prefix(processor, logits, offset)
        return logits

    def draw(self, logits: Tensor, noise: RoundNoise | None, offset: int = 0, want_logprobs: bool = False) -> Draw:
        """Processes logits `[B, n, vocabulary]` of positions `offset..offset + n` and draws a token at each.

        On CUDA one kernel draws, and makes the noise as it goes; temperature acts in it, and so do top-k and min-p, by
        thresholds, where nothing else is set.
        """
        if not _is_fused(logits):
            return draw(self(widen(logits), offset), noise, offset, want_logprobs)
        from .kernels.gumbel_sampler import fused_draw  # imports Triton

        batch, count, _ = logits.shape
        temperature, floors = 1.0, None
        if self._filters is None:
            logits = self(widen(logits), offset)  # [B, n, V]
        else:
            temperature = self._filters.temperature
            floors = self._filters.floors(logits.flatten(0, 1))  # [B * n]
        keys = None if noise is None else noise.keys[:, offset : offset + count].reshape(-1)  # [B * n]
        drawn = fused_draw(logits.flatten(0, 1), keys, temperature, floors)  # of [B * n] each
        tokens, scores, logprobs = (part.view(batch, count) for part in drawn)
        return Draw(tokens, scores, logprobs if want_logprobs else None)

    def _process_by_prefix(self, processor: LogitsProcessor, logits: Tensor, offset: int) -> Tensor:
        processed = torch.empty_like(logits)
        for row, step, prefix in self._prefixes.groups(offset, logits.shape[1]):
            requests = self._prefixes.rows.requests[row]  # [n]
            if isinstance(processor, _ROW_BOUND):
                for i, request in enumerate(requests.tolist()):
                    bound = _bind_to_row(processor, request, self._batch_size)
                    processed[row[i], step[i]] = bound(prefix[i : i + 1], logits[row[i], step[i]][None])[0]
            elif isinstance(processor, hf.RepetitionPenaltyLogitsProcessor):
                bound = _bind_padding(processor, requests, self._batch_size)
                processed[row, step] = bound(prefix, logits[row, step])
            else:
                processed[row, step] = processor(prefix, logits[row, step])
        return processed


@dataclass(frozen=True)
class Filters:
    """Temperature, top-k and min-p, of which the last two only say from which logit on a token may be drawn.

    Attributes:
        temperature: divides the logits.
        top_k: tokens that may be drawn; None: all.
        min_p: least probability, as a share of the largest one; None: none.
    """

    temperature: float = 1.0
    top_k: int | None = None
    min_p: float | None = None

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> "Filters | None":
        """What `processors` amount to, or None where there are others, or these in another order."""
        filters = cls()
        for processor in processors:
            if type(processor) is hf.TemperatureLogitsWarper and filters == cls():
                filters = replace(filters, temperature=processor.temperature)
            elif (
                type(processor) is hf.TopKLogitsWarper and filters.top_k is filters.min_p is None and _bars(processor)
            ):
                filters = replace(filters, top_k=processor.top_k)
            elif type(processor) is hf.MinPLogitsWarper and filters.min_p is None and _keeps_one(processor):
                filters = replace(filters, min_p=processor.min_p or None)
            else:
                return None
        return filters

    @property
    def cuts_nothing(self) -> bool:
        """Whether every token may be drawn."""
        return self.top_k is None and self.min_p is None

    def floors(self, logits: Tensor) -> Tensor | None:
        """Smallest logits `[n]` float32, divided by the temperature, that may be drawn from `logits` `[n, V]`."""
        bounds = []
        if self.top_k is not None:
            bounds.append(logits.topk(min(self.top_k, logits.shape[1]), sorted=False).values.amin(1).float())
        if self.min_p is not None:
            # p >= min_p * p_max, whatever top-k has left out: the two share their normaliser.
            bounds.append(logits.amax(1).float() + self.temperature * math.log(self.min_p))
        return torch.stack(bounds).amax(0) / self.temperature if bounds else None


def _bars(warper: hf.TopKLogitsWarper | hf.MinPLogitsWarper) -> bool:
    """Whether what it filters out cannot be drawn at all."""
    return warper.filter_value == -math.inf


def _keeps_one(warper: hf.MinPLogitsWarper) -> bool:
    return warper.min_tokens_to_keep == 1 and _bars(warper)


def _is_fused(logits: Tensor) -> bool:
    """Whether one kernel draws from these logits."""
    return run_on(logits.device) and logits.dtype != torch.float64


def _bind_to_row(processor: LogitsProcessor, request: int, batch_size: int) -> LogitsProcessor:
    """The processor as it acts on one row of the caller's batch, whatever row of ours that request sits in."""
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


def _bind_padding(
    processor: hf.RepetitionPenaltyLogitsProcessor, requests: Tensor, batch_size: int
) -> hf.RepetitionPenaltyLogitsProcessor:
    """The processor with the padding of `requests` (`[n]`), which transformers >= 5.23 keeps for the caller's rows."""
    padding = processor.prompt_ignore_length
    if not isinstance(padding, Tensor):
        return processor
    bound = copy.copy(processor)
    bound.prompt_ignore_length = padding.to(requests.device)[requests // (batch_size // len(padding))]  # [n]
    return bound


class Stopping:
    """When a row ends: any EOS id, its length limit, or a stopping criterion.

    Args:
        criteria: as prepared by `generate`.
        prefixes: the rows they look at.
    """

    def __init__(self, criteria: StoppingCriteriaList, prefixes: PrefixView) -> None:
        self._prefixes = prefixes
        device = prefixes.rows.tokens.device
        eos = [c.eos_token_id.to(device).view(-1) for c in criteria if isinstance(c, EosTokenCriteria)]
        self._eos = torch.cat(eos) if eos else None  # [ids]
        self._others: list[StoppingCriteria] = [
            c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)
        ]

    def first_stop(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the next tokens each row keeps.

        Args:
            tokens: `[B, n]` next tokens, already written behind the committed ones.
            counts: `[B]` how many of them were verified.

        Returns:
            Tokens kept `[B]` int64 (at least one) and whether the row ends there `[B]` bool.
        """
        rows = self._prefixes.rows
        room = rows.limits - rows.lengths  # [B]
        keep = torch.minimum(counts, room)
        ends = keep == room
        if self._eos is not None:
            is_eos = torch.isin(tokens, self._eos)  # [B, n]
            first = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, tokens.shape[1] + 1)  # [B]
            ends = torch.where(first <= keep, True, ends)
            keep = torch.minimum(keep, first)
        if self._others:
            keep, ends = self._apply_criteria(keep, ends)
        return keep, ends

    def _apply_criteria(self, keep: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(keep.max())
        stopped = torch.zeros(len(keep), longest, dtype=torch.bool, device=keep.device)  # [B, n]
        for row, step, prefix in self._prefixes.groups(1, longest):  # prefixes that end with the token
            inside = step < keep[row]
            if inside.any():
                row, step, prefix = row[inside], step[inside], prefix[inside]
                for criterion in self._others:
                    stopped[row, step] |= criterion(prefix, None)
        first = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, longest + 1)  # [B]
        return torch.minimum(keep, first), ends | (first <= keep)


def length_limit(criteria: StoppingCriteriaList) -> int:
    """Largest padded total length that `criteria` allow."""
    return min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
