"""Applies `generate`'s stopping criteria to rows of different lengths."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from ..rows import Integers, PrefixView
from .accept import Bools
from .processors import is_known, needs_batch


class Stopping:
    """Ends a row: at any EOS id, its length limit, or a stopping criterion; `criteria` as prepared by `generate`."""

    def __init__(self, criteria: StoppingCriteriaList, prefixes: PrefixView) -> None:
        self._prefixes, self._criteria = prefixes, criteria
        eos, self._of_time = list[int](), list[MaxTimeCriteria]()
        self._by_prefix = list[StoppingCriteria]()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                eos += criterion.eos_token_id.view(-1).tolist()
            elif type(criterion) is MaxTimeCriteria:  # reads no token
                self._of_time.append(criterion)
            elif type(criterion) is not MaxLengthCriteria and not needs_batch(criterion):
                self._by_prefix.append(criterion)
        self._eos = np.array(eos, np.int64)  # [ids]
        self._may_refuse = not all(map(is_known, self._by_prefix))

    def first_stop(self, tokens: Integers, counts: Integers, remaining: Integers) -> tuple[Integers, Bools]:
        """Finds the ends of rows with `remaining` (`[B]`) tokens left.

        Args:
            tokens: `[B, n]`, next tokens, already written after the committed ones.
            counts: `[B]`, number of verified tokens; 0: the row takes none, and continues.
            remaining: `[B]`, most tokens that a row may take.

        Returns:
            Number of tokens that a row takes, `[B]`, at least one if there are any; and whether it ends there, `[B]`.
        """
        keep = np.minimum(counts, remaining)  # [B]
        ends = keep == remaining  # [B]
        if len(self._eos):
            is_eos = (tokens[..., None] == self._eos).any(-1)  # [B, n]
            first = np.where(is_eos.any(1), is_eos.argmax(1) + 1, tokens.shape[1] + 1)  # [B]
            ends |= first <= keep
            keep = np.minimum(keep, first)
        if self._by_prefix:
            # A user's criterion may raise on a text that continues after its end.
            longest = int(keep.max())
            for start, count in [(n, 1) for n in range(longest)] if self._may_refuse else [(0, longest)]:
                first = self._first_by_prefix(keep, start, count)
                ends |= first <= keep
                keep = np.minimum(keep, first)
        for clock in self._of_time:
            if bool(clock(self._prefixes.rows.tokens[:1], None)):  # the next token is the last, as in generate
                keep, ends = np.minimum(keep, 1), keep > 0
        return keep, ends

    def in_step(self, step: int) -> Tensor:
        """`[B]` bool: whether rows end with the token before place `step`. Shows all rows, in the caller's order, to
        every criterion once, in `generate`'s order."""
        return self._criteria(self._prefixes.batch(step), None)[self._prefixes.rows.requests]

    def _first_by_prefix(self, keep: Integers, start: int, count: int) -> Integers:
        """`[B]`: number of tokens at a row's stop, if at one of its tokens `start..start + count`, of `keep`
        (`[B]`) tokens; else `keep + 1`."""
        row, place = (np.arange(start, start + count) < keep[:, None]).nonzero()  # of each token
        stopped = np.zeros((len(keep), count), np.bool_)  # [B, n]
        at, steps = row.tolist(), (start + place + 1).tolist()  # prefixes that end with the token
        for member, prefix in self._prefixes.groups(at, self._prefixes.widths(at, steps)):
            for criterion in self._by_prefix:
                stopped[row[member], place[member]] |= torch.as_tensor(criterion(prefix, None)).cpu().numpy()
        return np.where(stopped.any(1), start + stopped.argmax(1) + 1, keep + 1)


def needing_rows(parts: Iterable[LogitsProcessor | StoppingCriteria]) -> str:
    """Names the processors and criteria among `parts` that need a :class:`~.RolloutInStep`; empty: none."""
    names = [getattr(part, "__qualname__", type(part).__qualname__) for part in parts if needs_batch(part)]
    return ", ".join(dict.fromkeys(names))
