"""Applies `generate`'s repetition penalty on the device, so that draft loops can be captured."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from ..rows import PrefixView


NOTHING = 1 << 62
"""Marks a place without a token."""


@dataclass(frozen=True)
class Seen:
    """Tokens before the positions of B rows.

    Args:
        text: `[B, W]` int64, before all positions, in any order; ids outside of the vocabulary are ignored.
        drafts: `[B, γ]` int64, tokens after the text: position `i` follows the first `i`.
    """

    text: Tensor
    drafts: Tensor


def penalise(logits: Tensor, penalty: float, seen: Seen, first: int = 0) -> Tensor:
    """Returns logits `[B, n, vocabulary]` of the positions `first..first + n`, in at least float32: of seen tokens,
    positive ones are divided by `penalty`, others multiplied."""
    batch, count, vocabulary = logits.shape
    # One more element takes the writes of ignored ids.
    flat = logits.new_empty(logits.numel() + 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    processed = flat[:-1].view(logits.shape).copy_(logits)
    token, drafts = seen.text, seen.drafts[:, : first + count - 1]  # [B, W], [B, m]
    if drafts.shape[1]:
        token = torch.cat([token, drafts], dim=1)
    token = token[:, None]  # [B, 1, W + m]
    if count > 1 and drafts.shape[1]:
        later = torch.ones(count, token.shape[2], dtype=torch.bool, device=token.device)
        token = token.masked_fill(later.triu(seen.text.shape[1] + first), NOTHING)  # [B, n, W + m]
    start = torch.arange(0, logits.numel(), vocabulary, device=token.device).view(batch, count, 1)
    at = (token + start).masked_fill_(token >= vocabulary, logits.numel()).flatten()  # [B * n * (W + m)]
    score = flat.gather(0, at)
    flat.scatter_(0, at, torch.where(score < 0, score * penalty, score / penalty))
    return processed


def ignored_by(
    processor: RepetitionPenaltyLogitsProcessor, view: PrefixView, batch_size: int, row: Tensor | None
) -> Tensor | int | None:
    """First tokens that `processor` ignores in the prefixes of `row` (`[n]` int64; None: of all): a number, or `[n]`
    where it stores them by row of the caller's batch of `batch_size` rows (padding, since transformers 5.23)."""
    ignored, requests = processor.prompt_ignore_length, view.rows.requests
    if not isinstance(ignored, Tensor):
        return ignored
    requests = requests if row is None else requests[row]  # [n]
    copies = batch_size // len(ignored)  # num_return_sequences
    return ignored.to(requests.device)[requests if copies == 1 else requests // copies]


class PenalisedText:
    """The text that `processor` reads."""

    def __init__(self, processor: RepetitionPenaltyLogitsProcessor, view: PrefixView, batch_size: int) -> None:
        self._processor, self._prefixes, self._batch_size = processor, view, batch_size
        self._made_for: object = None
        self._newest: Tensor

    def of_rows(self) -> Tensor:
        """`[B, W]` int64, `text` of :class:`Seen`: committed tokens of the rows in flight, shared by the drafter and
        the target of a round."""
        rows = self._prefixes.rows
        made_for = (rows.commits, *rows.indices)
        if made_for != self._made_for:
            width = self._prefixes.padded + int(rows.host_generated.max())
            self._newest, self._made_for = self._before(None, rows.generated, width), made_for
        return self._newest

    def before(self, row: Sequence[int], widths: Sequence[int]) -> Tensor:
        """The same of prefixes of `row` with `widths`, n each."""
        view = self._prefixes
        return self._before(view.on_device(row), view.on_device(widths) - view.padded, max(widths))

    def _before(self, row: Tensor | None, generated: Tensor, width: int) -> Tensor:
        view = self._prefixes
        place = view.places[:width]
        hidden = place >= generated[:, None]  # [n, width]
        ignored = ignored_by(self._processor, view, self._batch_size, row)
        if isinstance(ignored, Tensor):
            hidden |= place < (ignored - view.padded)[:, None]
        elif ignored:
            hidden |= place < ignored - view.padded
        return view.prefixes(row, width).masked_fill_(hidden, NOTHING)
