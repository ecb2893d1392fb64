"""The rows in flight: the request in each row of the cache, its tokens, also as `generate` shows them; their noise."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kv.base import KVCache
from .kv.memory import check_memory, sent
from .network.media import MediaPrompt
from .sampling.noise import CPU_CHUNK, MOST_ROUNDS, RoundNoise, position_keys
from .saved_row import TARGET, SavedRow


Integers = NDArray[np.int64]
SHORT_PROMPT = 16
"""Tokens: up to this length a CPU reads a prompt through the single-call layers of generated tokens (`cpu_layers.py`),
longer ones through prefill. The choice looks at one row only, so a row's bits never depend on its neighbours."""

Spans: TypeAlias = tuple[tuple[int, int], ...]
Text: TypeAlias = tuple[bytes, Spans, MediaPrompt | None]
"""Tokens of a prompt, its spans and media: of equal ones K/V is equal."""


class Piece(NamedTuple):
    """Columns `first..end` of a text, `generated`, or of a prompt, `short` or not."""

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
        media: of the prompt; None: it is text.
        device: of its rows; None: the prompt's.
    """

    index: int
    prompt: Tensor
    limit: int
    stream: int
    saved: SavedRow | None = None
    spans: Spans = ()
    media: MediaPrompt | None = None
    device: torch.device | None = None

    @property
    def text(self) -> Text:
        """What decides the K/V of its prompt."""
        return self.prompt.cpu().numpy().tobytes(), self.spans, self.media

    @property
    def generated(self) -> Tensor | None:
        """`[n]` int64 generated tokens, or None."""
        return None if self.saved is None else self.saved.tokens

    @property
    def length(self) -> int:
        return len(self.prompt) + (0 if self.generated is None else len(self.generated))

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Columns `start..stop` in the pieces in which a conversation computes them, so that recomputed K/V is the
        same."""
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


@dataclass(frozen=True)
class Admission:
    """Requests that have just entered rows.

    Rows `first..first + leaders` hold texts to prefill; row `followers[i]` has the same prompt as row `sources[i]`
    (prefix sharing: the G copies of a GRPO prompt are prefilled once). `lengths`, `requests`: of all of the rows.
    `media`: of prompts that have some; leaders with media come first, and followers with media last. `saved`:
    of leaders that go on with a saved row.
    """

    first: int
    leaders: int
    followers: list[int]
    sources: list[int]
    lengths: list[int]
    requests: list[Request]
    media: dict[int, MediaPrompt] = field(default_factory=dict)
    saved: dict[int, SavedRow] = field(default_factory=dict)

    @functools.cached_property
    def first_token_rows(self) -> dict[int, int]:
        """Rows that still need their first token, in order, mapped to the rows whose logits they use: themselves, or
        leaders with the same prompt. Rows with generated tokens are absent: their first round reads the last one."""
        leaders, saved = range(self.first, self.first + self.leaders), self.saved
        read = {row: row for row in leaders if row not in saved or saved[row].tokens is None}
        copies = zip(self.followers, self.sources, strict=True)
        return read | {row: source if source in read else row for row, source in copies}

    @property
    def cached(self) -> list[int]:
        """Columns of K/V by row after the prefill."""
        return [length - (row not in self.first_token_rows) for row, length in enumerate(self.lengths, self.first)]

    def ends_short(self, row: int) -> bool:
        request = self.requests[row - self.first]
        return request.pieces(0, len(request.prompt))[-1].short

    def restore(self, owner: str, cache: KVCache) -> dict[int, int]:
        """Writes the saved K/V of `owner` into its `cache`; returns, by row, the number of first columns that `owner`
        need not compute. If columns before the saved ones are missing, the target's :meth:`read_prompts` computes them
        first."""
        return {row: saved.restore(row, owner, cache) for row, saved in self.saved.items() if not saved.first}


class Rows:
    """Fixed buffers for `capacity` rows of `columns` tokens; rows `0..active` are in flight.

    `lengths[b]` counts the committed tokens of row b; everything after them in `tokens[b]` is scratch, for drafts
    that are not yet verified:

        tokens[b]    prompt . . . output . . . | d1 d2 ... dγ | free
                                               ^ lengths[b]

    The last committed token is not in the K/V cache yet: the next forward feeds it, and the drafts after it.

    Attributes:
        lengths, prompt_lengths, limits: `[active]` int64 tokens: committed, of the prompt, and allowed.
        requests: `[active]` int64, index of the request by row; `indices`: the same on the host.
        streams: `[active]` int64 noise keys.
        host_lengths, host_prompt_lengths, host_limits: `[active]`, the same three on the host.
        texts: `[active]`, of the request, by row.
        most: snapshot of `host_lengths` at the peak of total tokens, taken when rows leave.
        commits: calls of :meth:`commit`; texts stay while this and `indices` do.
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
        self._keys = torch.zeros(capacity, columns, dtype=torch.int64, device=device)  # of the noise, by column
        self._state = torch.zeros(5, capacity, dtype=torch.int64, device=device)
        self._host = np.zeros((3, capacity), np.int64)
        self.set_active(0)
        self.most: list[int] = []
        self.commits = 0
        self.prompts: list[bytes] = []
        self.texts: list[Text] = []
        self.indices: list[int] = []

    def set_active(self, count: int) -> None:
        self.active = count
        state = self._state[:, :count]  # [5, active]
        self.lengths, self.prompt_lengths, self.limits, self.requests, self.streams = state
        self.host_lengths, self.host_prompt_lengths, self.host_limits = self._host[:, :count]  # [active] each

    @property
    def longest(self) -> int:
        return int(self.host_lengths.max(initial=0))

    @property
    def mean_length(self) -> float:
        return float(self.host_lengths.mean())

    @property
    def remaining(self) -> Integers:
        """`[active]`, on the host: tokens that a row may still generate."""
        return self.host_limits - self.host_lengths

    @property
    def host_generated(self) -> Integers:
        """`[active]`: `generated` on the host."""
        return self.host_lengths - self.host_prompt_lengths

    @property
    def generated(self) -> Tensor:
        """`[active]` int64: tokens generated so far, the position t of the next one."""
        return self.lengths - self.prompt_lengths

    def admit(self, requests: list[Request]) -> Admission:
        first = self.active
        row_of_prompt = dict(zip(self.texts, range(first), strict=True)) if self._shares else {}
        leaders: list[tuple[Text, Request]] = []
        followers: list[tuple[Text, Request]] = []
        media: dict[int, MediaPrompt] = {}
        saved: dict[int, SavedRow] = {}
        states: list[list[int]] = []  # [n, 5]
        seen, longest = set(row_of_prompt), 0
        for request in requests:
            key, longest = request.text, max(longest, len(request.prompt))
            (followers if key in seen and request.generated is None else leaders).append((key, request))
            if request.generated is None:  # else its K/V may not be here yet
                seen.add(key)
        # Rows of similar length prefill with little padding.
        leaders.sort(key=lambda leader: (leader[1].media is None, leader[1].length))
        followers.sort(key=lambda follower: follower[1].media is not None)
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
            if request.media is not None:
                media[row] = request.media
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
        return Admission(first, len(leaders), follower_rows, sources, lengths, admitted, media, saved)

    def generated_span(self, row: int) -> slice:
        return slice(int(self.host_prompt_lengths[row]), int(self.host_lengths[row]))

    def output(self, row: int, want_logprobs: bool) -> tuple[Tensor, Tensor | None]:
        """Generated tokens `[n]` of `row` and, if wanted, their log-probabilities `[n]`; copies."""
        span = self.generated_span(row)
        return self.tokens[row, span].clone(), self.logprobs[row, span].clone() if want_logprobs else None

    def save(self, row: int, cache: KVCache, first: int, want_logprobs: bool) -> SavedRow:
        """Copies the tokens of `row`, and the target's K/V from column `first` on, without the last token, which the
        next forward feeds."""
        tokens, logprobs = self.output(row, want_logprobs)
        columns = int(self.host_lengths[row]) - 1
        if first >= columns:
            return SavedRow(tokens, logprobs, 0, {})
        states = cache.export_row(row, first, columns)
        return SavedRow(tokens, logprobs, first, {TARGET: (columns, lambda: states)})

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
        """Commits scratch tokens up to `lengths` `[active]`, with `logprobs` `[active, n]` of the next n."""
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


class NoiseAhead:
    """Makes the noise of a round. On a CPU, for rounds that draw one token per row, it hashes several rounds ahead."""

    def __init__(self, rows: Rows, vocabulary: int) -> None:
        self._rows, self._vocabulary = rows, vocabulary
        self._indices: list[int] = []  # of the rows whose noise is hashed
        self._lengths = rows.host_lengths  # of the same, when it was hashed
        self._taken = self._hashed = 0  # rounds

    def of_round(self, count: int) -> RoundNoise:
        """Noise of the next `count` positions of the rows in flight."""
        rows = self._rows
        if count > 1 or rows.tokens.device.type != "cpu":
            return RoundNoise(rows.noise_keys(count), self._vocabulary)
        goes_on = rows.indices == self._indices and (rows.host_lengths == self._lengths + self._taken).all()
        if not goes_on or self._taken == self._hashed:
            most = min(MOST_ROUNDS, CPU_CHUNK // (rows.active * self._vocabulary), rows.columns - rows.longest)
            self._hashed, self._taken = max(most, 1), 0
            self._indices, self._lengths = list(rows.indices), rows.host_lengths.copy()
            self._noise = RoundNoise(rows.noise_keys(self._hashed), self._vocabulary)
        self._taken += 1
        return self._noise.part(self._taken - 1)


class PrefixView:
    """Rows as `generate` shows them: the caller's padded prompts `input_ids` `[requests, width]`, then the output."""

    def __init__(self, rows: Rows, input_ids: Tensor) -> None:
        self.rows = rows
        self._input_ids = input_ids.to(rows.tokens.device)
        self.padded = input_ids.shape[1]
        self.places = torch.arange(-self.padded, rows.columns, device=rows.tokens.device)  # 0: the first new token

    def over(self, rows: Rows) -> "PrefixView":
        """The same for other `rows` of the same requests."""
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
        """`[B]` int64: row by request."""
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
    """`[count]` int64 from `offset` on. Cached: making one on a GPU is a launch."""
    return torch.arange(offset, offset + count, device=device)
