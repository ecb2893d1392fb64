"""When a row ends: `generate`'s stopping criteria, applied to rows of different lengths."""

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .processors import PrefixView, is_known, needs_batch


class Stopping:
    """When a row ends: any EOS id, its length limit, or a stopping criterion; `criteria` as prepared by `generate`."""

    def __init__(self, criteria: StoppingCriteriaList, prefixes: PrefixView) -> None:
        self._prefixes = prefixes
        device = prefixes.rows.tokens.device
        eos = [c.eos_token_id.to(device).view(-1) for c in criteria if type(c) is EosTokenCriteria]
        self._eos = torch.cat(eos) if eos else None  # [ids]
        rest = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        self._of_batch: list[StoppingCriteria] = [c for c in rest if needs_batch(c)]
        self._by_prefix: list[StoppingCriteria] = [c for c in rest if not needs_batch(c)]
        self._may_refuse = not all(map(is_known, self._by_prefix))

    def first_stop(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the next `tokens` (`[B, n]`, already written after the committed ones), of which `counts` (`[B]`
        int64) were verified, each row keeps (`[B]` int64, at least one), and whether it ends there (`[B]` bool)."""
        rows = self._prefixes.rows
        room = rows.limits - rows.lengths  # [B]
        keep = torch.minimum(counts, room)
        ends = keep == room
        if self._eos is not None:
            is_eos = torch.isin(tokens, self._eos)  # [B, n]
            first = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, tokens.shape[1] + 1)  # [B]
            ends = torch.where(first <= keep, True, ends)
            keep = torch.minimum(keep, first)
        if self._by_prefix:
            # A criterion of the user's may refuse a text that goes on after its end.
            longest = int(keep.max())
            for start, count in [(n, 1) for n in range(longest)] if self._may_refuse else [(0, longest)]:
                keep, ends = self._stop_by_prefix(keep, ends, start, count)
        for criterion in self._of_batch:
            ends = ends | (ends.new_zeros(len(ends)) | criterion(self._prefixes.batch(1), None))[rows.requests]
        return keep, ends

    def _stop_by_prefix(self, keep: Tensor, ends: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
        """`keep` and `ends`, where a row may also stop at one of its tokens `start..start + count`."""
        step = torch.arange(start, start + count, device=keep.device)  # [n]
        row, place = (step < keep[:, None]).nonzero(as_tuple=True)
        stopped = torch.zeros(len(keep), count, dtype=torch.bool, device=keep.device)  # [B, n]
        at, steps = row.tolist(), (start + place + 1).tolist()  # prefixes that end with the token
        for member, prefix in self._prefixes.groups(at, self._prefixes.widths(at, steps)):
            for criterion in self._by_prefix:
                stopped[row[member], place[member]] |= criterion(prefix, None)
        first = torch.where(stopped.any(1), start + stopped.int().argmax(1) + 1, keep + 1)  # [B]
        return torch.minimum(keep, first), ends | (first <= keep)


def length_limit(criteria: StoppingCriteriaList) -> int:
    """Largest padded total length that `criteria` allow."""
    return min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
