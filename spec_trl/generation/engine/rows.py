"""Holds the rows in flight and their tokens, and the queue of requests."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .kv.cache import RaggedCache
from .kv.memory import check_memory, sent
from .sampling.accept import Integers
from .sampling.noise import position_keys
from .saved_row import SavedRow


if TYPE_CHECKING:
    from .network.image_prompts import ImagePrompt
    from .parked_rows import ParkedRows
    from .rollout import Rollout


SHORT_PROMPT = 16
"""Prompts of so few tokens are read like generated tokens on a CPU, where a decoder layer of few tokens is one call
(`cpu_layers.py`). Only the prompt's length decides, so that its sums do not depend on other rows."""

Spans: TypeAlias = tuple[tuple[int, int], ...]
Text: TypeAlias = "tuple[bytes, Spans, ImagePrompt | None]"
"""Tokens of a prompt, its spans and images: of equal ones K/V is equal."""


class Piece(NamedTuple):
    """Columns `first..end` of a text, generated ones or those of a prompt, which is `short` or not."""

    first: int
    end: int
    generated: bool
    short: bool


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Args:
        index: row of the caller's batch.
        prompt: `[length]` int64, without padding, on the host: reading it waits for no device.
        limit: most tokens, the prompt's included.
        stream: key of its noise.
        saved: of a row that had the request before, here or on another rank; None: no row had it.
        spans: columns of the prompt that earlier turns of a conversation have generated, without the last token of a
            turn, which the next turn reads: pairs of first and end, ascending.
        images: of the prompt; None: it is text.
        device: of its rows; None: the prompt's.
    """

    index: int
    prompt: Tensor
    limit: int
    stream: int
    saved: SavedRow | None = None
    spans: Spans = ()
    images: "ImagePrompt | None" = None
    device: torch.device | None = None

    @property
    def text(self) -> Text:
        """What decides the K/V of its prompt."""
        return self.prompt.cpu().numpy().tobytes(), self.spans, self.images

    @property
    def generated(self) -> Tensor | None:
        """`[n]` int64, generated tokens; None: there are none."""
        return None if self.saved is None else self.saved.tokens

    @property
    def length(self) -> int:
        """Number of tokens, of the prompt and generated ones."""
        return len(self.prompt) + (0 if self.generated is None else len(self.generated))

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Columns `start..stop` in the pieces in which a conversation computes them, so that K/V is the same if it is
        computed again."""
        pieces, column, short = [], 0, SHORT_PROMPT if (self.device or self.prompt.device).type == "cpu" else 0
        for first, end in (*self.spans, (len(self.prompt), self.length)):
            for begin, finish, generated in ((column, first, False), (first, end, True)):
                if max(begin, start) < min(finish, stop):
                    is_short = finish - begin <= short
                    pieces.append(Piece(max(begin, start), min(finish, stop), generated, is_short))
            column = end
        return pieces


def prompt_key(prompt: Tensor) -> str:
    """A short key of `prompt`'s tokens (`[prompt length]` int64), the same in every run."""
    return hashlib.blake2b(prompt.cpu().numpy().tobytes(), digest_size=8).hexdigest()


class RequestQueue:
    """Hands out `requests` in order. `distributed/pool.py` has a queue that several ranks share.

    Attributes:
        requests: all of the batch, by index.
        waiting: number of requests that no rank decodes yet, as far as this rank knows.
        parked: takes the K/V of rows that end, for the next turn of a conversation; None: it is dropped.
    """

    parked: "ParkedRows | None" = None

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self._dealt = list(requests)  # requests that this rank gives out
        self.waiting = len(requests)

    @property
    def upcoming(self) -> Request | None:
        """The next request, if that is known."""
        return self._dealt[0] if self._dealt else None

    def take(self, free: int, active: int) -> list[Request]:
        """Returns up to `free` requests to start now, next to `active` rows. No request while `active` is 0 ends the
        rollout."""
        taken, self._dealt = self._dealt[:free], self._dealt[free:]
        self.waiting = len(self._dealt)
        return taken

    def put_back(self, requests: list[Request]) -> None:
        """Puts taken `requests` back, in front."""
        self._dealt = requests + self._dealt
        self.waiting += len(requests)

    def keeps(self, index: int) -> bool:
        """Called once when request `index` ends; False discards its completion: another rank ended it first."""
        return True

    def after_round(self, rollout: "Rollout") -> None:
        """Called after a round, when ended rows have left; the queue may take further rows out of `rollout`."""


@dataclass(frozen=True)
class Admission:
    """Requests that have just entered rows.

    Rows `first..first + leaders` hold texts to prefill; row `followers[i]` has the same prompt as row `sources[i]`
    (prefix sharing: the G copies of a GRPO prompt are prefilled once). `lengths`, `requests`: of all of the rows.
    `images`: of prompts that have some; leaders with images come first, and followers with images last. `saved`:
    of leaders that go on with a saved row.
    """

    first: int
    leaders: int
    followers: list[int]
    sources: list[int]
    lengths: list[int]
    requests: list[Request]
    images: "dict[int, ImagePrompt]" = field(default_factory=dict)
    saved: dict[int, SavedRow] = field(default_factory=dict)

    @functools.cached_property
    def first_token_rows(self) -> dict[int, int]:
        """Rows that need their first token, in order, each mapped to the row whose logits it uses: its leader, or
        itself for a copy of a row that was in flight before. Rows with generated tokens are absent: their first round
        feeds the last one."""
        leaders, saved = range(self.first, self.first + self.leaders), self.saved
        read = {row: row for row in leaders if row not in saved or saved[row].tokens is None}
        copies = zip(self.followers, self.sources, strict=True)
        return read | {row: source if source in read else row for row, source in copies}

    @property
    def cached(self) -> list[int]:
        """Columns of K/V by row after the prompts have been read."""
        return [length - (row not in self.first_token_rows) for row, length in enumerate(self.lengths, self.first)]

    def ends_short(self, row: int) -> bool:
        """Whether the prompt of `row` ends with a short piece."""
        request = self.requests[row - self.first]
        return request.pieces(0, len(request.prompt))[-1].short

    def restore(self, owner: str, cache: RaggedCache) -> dict[int, int]:
        """Writes the saved K/V of `owner` into its `cache`; returns, by row, the number of first columns that `owner`
        need not compute. Where columns before the saved ones are missing, :meth:`read_prompts` of the target computes
        them first."""
        return {row: saved.restore(row, owner, cache) for row, saved in self.saved.items() if not saved.first}


class Rows:
    """Fixed buffers for `capacity` rows of `columns` tokens; rows `0..active` are in flight.

    `lengths[b]` counts the committed tokens of row b; everything after them in `tokens[b]` is scratch, for drafts
    that are not yet verified:

        tokens[b]    prompt . . . output . . . | d1 d2 ... dγ | free
                                               ^ lengths[b]

    The last committed token is not in the K/V cache yet: the next forward feeds it, and the drafts after it.

    Attributes:
        active: rows in flight.
        lengths, prompt_lengths, limits: `[active]` int64 tokens: committed, of the prompt, and allowed.
        requests: `[active]` int64, index of the request in each row; `indices`: the same on the host.
        streams: `[active]` int64 noise keys.
        host_lengths, host_prompt_lengths, host_limits: `[active]`, the same three on the host.
        texts: `[active]`, of the request in each row.
        most: `host_lengths` when their sum was largest, over the times at which rows left.
        commits: calls of :meth:`commit`; as long as it and `indices` stay, texts stay.
    """

    lengths: Tensor
    prompt_lengths: Tensor
    limits: Tensor
    requests: Tensor
    streams: Tensor
    host_lengths: Integers
    host_prompt_lengths: Integers
    host_limits: Integers

    def __init__(self, capacity: int, columns: int, device: torch.device, shares_prompts: bool = True) -> None:
        self._shares = shares_prompts
        self.capacity, self.columns = capacity, columns
        check_memory(f"the tokens of {capacity} rows x {columns} columns", 20 * capacity * columns, device)
        self.tokens = torch.zeros(capacity, columns, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(capacity, columns, dtype=torch.float32, device=device)
        self._keys = torch.zeros(capacity, columns, dtype=torch.int64, device=device)  # of the noise at each column
        self._state = torch.zeros(5, capacity, dtype=torch.int64, device=device)
        self._host = np.zeros((3, capacity), np.int64)
        self.set_active(0)
        self.most: list[int] = []
        self.commits = 0
        self.prompts: list[bytes] = []
        self.texts: list[Text] = []
        self.indices: list[int] = []

    def set_active(self, count: int) -> None:
        """The first `count` rows are in flight."""
        self.active = count
        state = self._state[:, :count]  # [5, active]
        self.lengths, self.prompt_lengths, self.limits, self.requests, self.streams = state
        self.host_lengths, self.host_prompt_lengths, self.host_limits = self._host[:, :count]  # [active] each

    @property
    def longest(self) -> int:
        """Longest committed length among the active rows."""
        return int(self.host_lengths.max(initial=0))

    @property
    def mean_length(self) -> float:
        """Mean committed length of the active rows."""
        return float(self.host_lengths.mean())

    @property
    def remaining(self) -> Integers:
        """`[active]`, on the host: tokens that a row may still generate."""
        return self.host_limits - self.host_lengths

    @property
    def host_generated(self) -> Integers:
        """`[active]`: `generated`, on the host."""
        return self.host_lengths - self.host_prompt_lengths

    @property
    def generated(self) -> Tensor:
        """`[active]` int64: tokens generated so far, the position t of the next one."""
        return self.lengths - self.prompt_lengths

    def admit(self, requests: list[Request]) -> Admission:
        """Puts `requests` into the free rows after the active ones."""
        first = self.active
        row_of_prompt = dict(zip(self.texts, range(first), strict=True)) if self._shares else {}
        leaders: list[tuple[Text, Request]] = []
        followers: list[tuple[Text, Request]] = []
        images: dict[int, ImagePrompt] = {}
        saved: dict[int, SavedRow] = {}
        states: list[list[int]] = []  # [n, 5]
        seen, longest = set(row_of_prompt), 0
        for request in requests:
            key, longest = request.text, max(longest, len(request.prompt))
            (followers if key in seen and request.generated is None else leaders).append((key, request))
            if request.generated is None:  # else its K/V may not be here yet
                seen.add(key)
        # Rows of similar length prefill with little padding.
        leaders.sort(key=lambda leader: (leader[1].images is None, leader[1].length))
        followers.sort(key=lambda follower: follower[1].images is not None)
        texts = np.zeros((len(requests), longest), np.int64)
        for text, (key, request) in zip(texts, leaders + followers, strict=True):
            text[: len(request.prompt)] = np.frombuffer(key[0], np.int64)
        self.tokens[first : first + len(texts), : texts.shape[1]] = sent(torch.from_numpy(texts), self.tokens.device)
        for row, (key, request) in enumerate(leaders + followers, start=first):
            prompt, length = len(request.prompt), request.length
            if request.generated is None:
                row_of_prompt.setdefault(key, row)
            else:
                self.tokens[row, prompt:length] = request.generated
            if request.images is not None:
                images[row] = request.images
            if request.saved is not None and row < first + len(leaders):
                saved[row] = request.saved
                if request.saved.logprobs is not None:
                    self.logprobs[row, prompt:length] = request.saved.logprobs
            states.append([length, prompt, request.limit, request.index, request.stream])
            self._host[:, row] = length, prompt, request.limit
            self.prompts.append(key[0])
            self.texts.append(key)
            self.indices.append(request.index)
        new = torch.tensor(states).view(len(states), 5)
        self._state[:, first : first + len(states)] = sent(new, self.tokens.device).T
        self.set_active(first + len(requests))
        columns = torch.arange(self.columns, device=self.tokens.device)  # [columns]
        positions = columns - self.prompt_lengths[first:, None]  # [n, columns]
        self._keys[first : self.active] = position_keys(self.streams[first:], positions)
        follower_rows = list(range(first + len(leaders), self.active))
        sources = [row_of_prompt[key] for key, _ in followers]
        lengths = self.host_lengths[first:].tolist()
        admitted = [request for _, request in leaders + followers]
        return Admission(first, len(leaders), follower_rows, sources, lengths, admitted, images, saved)

    def generated_span(self, row: int) -> slice:
        """Columns of the generated tokens of `row`."""
        return slice(int(self.host_prompt_lengths[row]), int(self.host_lengths[row]))

    def output(self, row: int, want_logprobs: bool) -> tuple[Tensor, Tensor | None]:
        """Generated tokens `[n]` of `row` and, if wanted, their log-probabilities `[n]`; copies."""
        span = self.generated_span(row)
        return self.tokens[row, span].clone(), self.logprobs[row, span].clone() if want_logprobs else None

    def write(self, offset: int, tokens: Tensor) -> None:
        """Writes `[active, n]` tokens after the committed ones, from `offset` on."""
        self.tokens[: self.active].scatter_(1, self.columns_after(offset, tokens.shape[1]), tokens)

    def columns_after(self, offset: int, count: int) -> Tensor:
        """`[active, count]` int64: columns `lengths + offset .. + count`."""
        return self.lengths[:, None] + _steps(offset, count, self.lengths.device)

    def window(self, offset: int, count: int) -> Tensor:
        """`[active, count]` int64 tokens from `lengths + offset` on."""
        return self.tokens[: self.active].gather(1, self.columns_after(offset, count))

    def noise_keys(self, count: int) -> Tensor:
        """`[active, count]` int64: keys of the noise at the next `count` generated positions."""
        return self._keys[: self.active].gather(1, self.columns_after(0, count))

    def commit(self, lengths: Integers, logprobs: Tensor | None) -> None:
        """Commits scratch tokens, up to `lengths` `[active]` tokens by row, with `logprobs` `[active, n]` of the next
        n."""
        if logprobs is not None:
            columns = self.columns_after(0, logprobs.shape[1])  # [active, n]
            self.logprobs[: self.active].scatter_(1, columns, logprobs.float())
        self.commits += 1
        self.host_lengths[:] = lengths
        new = torch.from_numpy(lengths)  # [active]
        # Pinned memory makes the copy asynchronous.
        self.lengths.copy_(new.pin_memory() if self.lengths.is_cuda else new, non_blocking=True)

    def drop(self, finished: list[int]) -> tuple[list[int], list[int]]:
        """Removes `finished` rows and fills the gaps with the last active rows.

        Returns:
            Rows that moved, and their new rows; the caller moves their K/V.
        """
        self.most = max(self.most, self.host_lengths.tolist(), key=sum)
        remaining = self.active - len(finished)
        destination = [row for row in finished if row < remaining]
        source = [row for row in range(remaining, self.active) if row not in finished]
        if source:
            to, at = sent(torch.tensor([destination, source]), self.tokens.device)  # [n] each
            for state in (self.tokens, self.logprobs, self._keys):
                state[to] = state[at]
            self._state[:, to] = self._state[:, at]
            self._host[:, destination] = self._host[:, source]
            for row, target in zip(source, destination, strict=True):
                self.prompts[target], self.indices[target] = self.prompts[row], self.indices[row]
                self.texts[target] = self.texts[row]
        del self.prompts[remaining:], self.indices[remaining:], self.texts[remaining:]
        self.set_active(remaining)
        return source, destination


class PrefixView:
    """Rows as `generate` would show them: the caller's padded prompts `input_ids` `[requests, width]`, then the
    output."""

    def __init__(self, rows: Rows, input_ids: Tensor) -> None:
        self.rows = rows
        self._input_ids = input_ids.to(rows.tokens.device)
        self.padded = input_ids.shape[1]
        self.places = torch.arange(-self.padded, rows.columns, device=rows.tokens.device)  # 0: the first new token

    def over(self, rows: Rows) -> "PrefixView":
        """A view of other `rows` of the same requests."""
        return PrefixView(rows, self._input_ids)

    def widths(self, row: Sequence[int], step: Sequence[int]) -> list[int]:
        """Widths of the prefixes before the positions `step` tokens after the committed ones of `row`, n each."""
        spans = map(self.rows.generated_span, row)
        return [self.padded + span.stop - span.start + more for span, more in zip(spans, step, strict=True)]

    def groups(self, row: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Groups places in `row` by the `widths` of the prefixes before them, n each; yields m indices into both, and
        prefixes `[m, width]`."""
        for width in sorted(set(widths)):
            member = [i for i, other in enumerate(widths) if other == width]
            yield member, self.prefixes(self.on_device([row[i] for i in member]), width)

    def batch(self, step: int) -> Tensor:
        """Prefixes `[B, width]` of all rows in the caller's order; all have generated equally many tokens."""
        return self.prefixes(self.order, self.widths([0], [step])[0])

    def on_device(self, numbers: Sequence[int]) -> Tensor:
        """Copies `[n]` int64 to the device of the rows, without waiting."""
        return sent(torch.tensor(numbers, dtype=torch.int64), self.rows.tokens.device)

    @property
    def order(self) -> Tensor:
        """`[B]` int64: which row holds each request."""
        return self.rows.requests.argsort()

    def prefixes(self, row: Tensor | None, width: int) -> Tensor:
        """`[n, width]` tokens of `row` (`[n]` int64; None: of all), drafts included; later columns are undefined."""
        rows, start, requests = self.rows, self.rows.prompt_lengths, self.rows.requests
        if row is not None:
            start, requests = start[row], requests[row]
        output = self.places[self.padded : width] + start[:, None]  # [n, new]
        output.clamp_(max=rows.columns - 1)
        new = rows.tokens[: rows.active].gather(1, output) if row is None else rows.tokens[row[:, None], output]
        return torch.cat([self._input_ids[requests], new], dim=1)


@functools.lru_cache(maxsize=256)
def _steps(offset: int, count: int, device: torch.device) -> Tensor:
    """`[count]` int64: `offset`, `offset + 1`, …. Cached: on a GPU making one is a launch."""
    return torch.arange(offset, offset + count, device=device)
