"""How many rows there is memory for, and which rows leave when it ends."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from .attention import reads_spans
from .cache import autocast_dtype
from .drafter import Drafter
from .linear_layers import bytes_of_copies
from .memory import free_memory
from .model_costs import kv_bytes
from .outcome import Integers
from .paged_cache import PagedCache
from .pages import PAGE_COLUMNS, pages_of
from .rows import Request, Rows, text_length
from .runner import TOKENS_PER_FORWARD


_LOGITS = 3  # float32 tensors of the size of the logits that verification keeps: logits, processed scores, noise
LEAST_GRAPH_MEMORY = 2**28
"""Bytes that captured forwards may take however little is free: logits of 64 rows x 6 tokens of a vocabulary of 152 k
take 111 MiB in 16 bits, which all share, and activations of the widest one as much again."""
_GRAPHS_SHARE = 8  # of what is free, one part is theirs before rows: an eighth fewer rows are little slower
_ACTIVATIONS = 16  # widest activations of a prefilled token over the hidden size: an MLP keeps 3 of about 5 times it


@dataclass(frozen=True)
class RowNeeds:
    """Bytes that generating takes beside weights.

    Args:
        column: K/V of one column of a row, in the target's cache and its drafters'.
        row: a row's share in the activations of a verification; and what of its K/V is taken at full length, where the
            rest lies in the pages of a pool.
        fixed: activations of a prefill, copies of weights for autocast, and captured forwards (:meth:`with_graphs`).
    """

    column: float
    row: float
    fixed: float

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        drafters: Sequence[Drafter],
        verified: int,
        prefilled: int,
        in_pool: int = 0,
    ) -> "RowNeeds":
        """Those of `model` and its `drafters`, where a row's `verified` tokens are verified at once, and at most
        `prefilled` are read. `in_pool`: columns of a row, where K/V lies in the pages of a pool."""
        dtype, config = autocast_dtype(model.device) or model.dtype, model.config.get_text_config(decoder=True)
        tokens = min(prefilled, TOKENS_PER_FORWARD)
        target = kv_bytes(model, dtype)
        whole = [drafter.column_bytes for drafter in drafters if in_pool and not drafter.uses_pool]
        if not reads_spans(model):  # pages are gathered, for one layer at a time
            whole.append(target / config.num_hidden_layers)
        return cls(
            column=target + sum(drafter.column_bytes for drafter in drafters if drafter.uses_pool or not in_pool),
            row=_LOGITS * verified * config.vocab_size * torch.float32.itemsize + in_pool * sum(whole),
            fixed=_ACTIVATIONS * tokens * config.hidden_size * dtype.itemsize + bytes_of_copies(model),
        )

    def graph_memory(self, rows: int, columns: int, free: int, most: float) -> float:
        """Bytes for captured forwards, of `free` bytes: `most`, or less where `rows` of `columns` would not fit beside
        them."""
        left = free - self.fixed - rows * (columns * self.column + self.row)
        return min(most, max(left, free / _GRAPHS_SHARE, LEAST_GRAPH_MEMORY))

    def with_graphs(self, graphs: float) -> "RowNeeds":
        """The same where captured forwards may take `graphs` bytes."""
        return replace(self, fixed=self.fixed + graphs)

    def rows_that_fit(self, columns: int, free: int) -> int:
        """Rows of `columns` for which `free` bytes are enough; at least one, whose cache says if it does not fit."""
        return max(int((free - self.fixed) // (columns * self.column + self.row)), 1)

    def pages_that_fit(self, rows: int, free: int) -> int:
        """Pages of a pool for which `free` bytes are enough beside what else `rows` rows need; 0 or less: none."""
        return int((free - self.fixed - rows * self.row) // (PAGE_COLUMNS * self.column))


warned_of: set[torch.device] = set()
"""Where little memory was warned of in this process."""


def warn_of_little_memory(device: torch.device, free: int, graphs: float, most: float, rows: int, asked: int) -> None:
    """Warns, once per device and process, where `free` bytes leave captured forwards `graphs` bytes, less than `most`,
    and `rows` of the `asked` rows are in flight."""
    if graphs >= most or device in warned_of:
        return
    warned_of.add(device)
    few = f", and {rows} of {asked} rows are in flight" if rows < asked else ""
    warnings.warn(
        f"{free / 2**30:.2f} GiB are free on {device}, which is little for {asked} rows: captured forwards may take "
        f"{graphs / 2**30:.2f} GiB instead of max_graph_memory={most / 2**30:g}{few}. Tokens are the same, but may "
        "come slower. Lower max_graph_memory, max_batch_size or max_new_tokens, or free memory.",
        stacklevel=2,
    )


class KVRoom:
    """Watches the memory of rows that take it as they grow.

    Nobody knows how long a row becomes. So rows are admitted while memory lasts until each has as many more tokens as
    it has generated, which is what long-tailed lengths make most likely, or a page; and where memory ends before, rows
    leave: the shortest, whose K/V is computed again soonest. They wait until another row has ended.
    """

    def __init__(self, rows: Rows, needs: RowNeeds) -> None:
        self._rows, self._needs = rows, needs
        self._slack, self._columns_then = 0.0, 0  # bytes to spare at the last look, and columns in flight then
        self._refused_at = rows.capacity + 1

    @property
    def is_full(self) -> bool:
        """Whether no row has left since there was no room for another one."""
        return self._rows.active >= self._refused_at

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of `requests`, from the first on, there is memory for; at least one where no row is in flight."""
        rows = self._rows
        growth = np.minimum(np.maximum(rows.host_generated, PAGE_COLUMNS), rows.room)  # [active]
        left = self._left(growth)
        count = 0
        for needed in self._needed(requests):
            left -= needed
            if left < 0:
                break
            count += 1
        if count < len(requests):
            self._refused_at = max(rows.active + count, 1)
        return count if count or rows.active else 1

    def leaving(self, columns: int) -> list[int]:
        """Rows that have to leave, so that each other one, of `columns` together, has memory for another page.

        It looks when half of what was to spare at the last look is taken: the system is asked seldom.
        """
        rows, needs = self._rows, self._needs
        if (columns - self._columns_then) * needs.column < self._slack / 2:
            return []
        per_row = PAGE_COLUMNS * needs.column + needs.row
        slack = self._free() - rows.active * per_row
        shortest = rows.host_lengths.argsort(kind="stable").tolist()
        leaving: list[int] = []
        while slack < 0 and len(leaving) < rows.active - 1:
            leaving.append(shortest[len(leaving)])
            columns -= rows.host_lengths[leaving[-1]]
            slack += rows.host_lengths[leaving[-1]] * needs.column + per_row
        if leaving:
            self._refused_at = rows.active - len(leaving)
        self._slack, self._columns_then = slack, columns
        return sorted(leaving)

    def _left(self, growth: Integers) -> float:
        """Bytes that are left when each row has become longer by `growth` `[active]` columns."""
        rows, needs = self._rows, self._needs
        return self._free() - rows.active * needs.row - int(growth.sum()) * needs.column

    def _needed(self, requests: Sequence[Request]) -> Iterator[float]:
        """Bytes that a row of each of `requests` will need."""
        for request in requests:
            yield _expected(request) * self._needs.column + self._needs.row

    def _free(self) -> float:
        return free_memory(self._rows.tokens.device) - self._needs.fixed


class PoolRoom(KVRoom):
    """The same where K/V lies in the pages of `cache`: it counts free pages, exactly, and so in every round. A round
    drafts `most_drafted` tokens of a row at most."""

    def __init__(self, rows: Rows, cache: PagedCache, most_drafted: int) -> None:
        super().__init__(rows, RowNeeds(0.0, 0.0, 0.0))
        self._pages, self._drafted = cache.pages, most_drafted

    def leaving(self, columns: int) -> list[int]:
        """Rows that have to leave, so that the others have pages for what the next round writes."""
        rows, lacking = self._rows, -self._left(np.zeros_like(self._rows.host_lengths))
        if lacking <= 0:
            return []
        shortest = rows.host_lengths.argsort(kind="stable").tolist()
        leaving: list[int] = []
        while lacking > self._pages.only_of(leaving) and len(leaving) < rows.active - 1:
            row = shortest[len(leaving)]
            leaving.append(row)
            lacking -= self._growth(row, rows.host_lengths[row])
        self._refused_at = rows.active - len(leaving)
        return sorted(leaving)

    def _left(self, growth: Integers) -> float:
        lengths = (self._rows.host_lengths + growth).tolist()
        return self._pages.free - sum(self._growth(row, length) for row, length in enumerate(lengths))

    def _needed(self, requests: Sequence[Request]) -> Iterator[float]:
        known = set(self._rows.prompts)
        for request in requests:
            pages = pages_of(_expected(request) + self._drafted)
            if request.progress is None:
                prompt = request.prompt.cpu().numpy().tobytes()
                if prompt in known:
                    pages -= (len(request.prompt) - 1) // PAGE_COLUMNS  # shared with another row
                known.add(prompt)
            yield pages

    def _growth(self, row: int, length: int) -> int:
        """Pages that a row of `length` tokens, and drafts after them, lacks."""
        return max(pages_of(length + self._drafted) - len(self._pages.of_row[row]), 0)


def _expected(request: Request) -> int:
    """Columns that a request will probably take: as many more as it has generated, and a page at least."""
    length = text_length(request)
    return min(length + max(length - len(request.prompt), PAGE_COLUMNS), request.limit)
