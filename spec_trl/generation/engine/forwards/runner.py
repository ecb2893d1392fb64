"""Forwards: runs one network over a ragged cache, eagerly: prefill, verification, drafting."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, groupby
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ....native.cpu_products import reading_prompts
from ..drafter import NetworkDraft
from ..kv.base import KVCache
from ..kv.cache import ReplayCache, autocast_dtype
from ..kv.memory import sent
from ..network.attention import EXACT_ATTENTION, MaskPlan, attended, reads_spans
from ..network.exact_sums import ExactSums
from ..network.family import Family
from ..network.family_hooks import cache_argument
from ..network.media import read_media
from ..network.shadow import keep_states
from ..requirements import position_limit
from ..rows import Admission, Piece, Rows
from ..sampling.accept import Proposal
from ..saved_row import TARGET
from .feature_runner import FeatureRunner


# Attention reads columns up to the longest row, rounded up: kernels that are prepared per shape (oneDNN on CPU,
# captured graphs on CUDA) need few shapes.
COLUMN_BUCKET = 32
# Tokens and columns of one prefill forward, padding included: they bound the memory of activations and masks.
TOKENS_PER_FORWARD = 8192
QUERIES_PER_FORWARD = 2048
# Logits of one prefill forward of a network that names no head: half a GiB in float32.
_LOGITS_PER_FORWARD = 2**27
_facts: "WeakKeyDictionary[nn.Module, tuple[MaskPlan, int | None, str, bool]]" = WeakKeyDictionary()

Listener = Callable[[Tensor, Tensor, int], None]


def _facts_of(network: PreTrainedModel) -> tuple[MaskPlan, int | None, str, bool]:
    """Masks and limit of positions of `network`, the name of its cache argument, and whether it can compute only the
    last logits. Read once per network: they are the same for shadows and their quantized twins."""
    facts = _facts.get(network)
    if facts is None:
        _facts[network] = facts = (
            MaskPlan.for_network(network), position_limit(network), cache_argument(network),
            network._supports_logits_to_keep(),
        )  # fmt: skip
    return facts


class EagerRunner:
    """Runs forwards of a network as they are.

    Args:
        network: a shadow (:func:`~.make_shadow`) or its quantized twin.
        cache: its K/V; a self-drafter shares that of its target.

    Attributes:
        forwards: since the generation began.
        eager_forwards: runs of the network's modules, warm-ups of captures included.
        uses_spans, is_exact: whether prompts, and what a :class:`GraphRunner` captures, attend under spans; or all.
        preparations: number of warm-up and capture forwards so far, those of the drafters' networks included.
        captured: number and bytes of captured forwards of this network and its drafters' networks.
    """

    preparations = 0
    captured = 0, 0

    def __init__(self, network: PreTrainedModel, cache: KVCache) -> None:
        self.network = network
        self.cache = cache
        self.forwards = 0
        self.eager_forwards = 0
        self._masks, self._position_limit, self._cache_argument, self._keeps_last_logits = _facts_of(network)
        self.uses_spans = reads_spans(network)
        self.is_exact = self.uses_spans and network.config._attn_implementation == EXACT_ATTENTION
        self._states: dict[int, Tensor] = {}
        self._stored: tuple[int, ...] = ()  # layers whose hidden states hooks keep
        self._listeners: list[tuple[tuple[int, ...], Listener]] = []
        self._hooks: list[RemovableHandle] = []

    def forward(
        self, tokens: Tensor, positions: Tensor, columns: int, first_row: int = 0, is_step: bool = False
    ) -> Tensor:
        """Runs `tokens` (`[B, q]` int64) of cache rows `first_row..first_row + B` at `positions` (`[B, q]` int64).

        Writes their K/V, attends over columns `0..columns` and returns logits `[B, q, vocab]`. `is_step`: every row
        feeds one token, which is not a draft.
        """
        self.forwards += 1
        self.cache.feeds(is_step=is_step)
        logits, features = self._run(tokens, positions, columns, first_row)
        if features is not None:
            self.call_listeners(features, positions, first_row)
        return logits

    def draft(self, draft: NetworkDraft, columns: int) -> Proposal:
        """Drafts token by token; the first forward attends over columns `0..columns`, the next over one more."""
        self.cache.begin_drafts(len(draft.tokens))
        return draft.run(lambda tokens, positions, step: self.forward(tokens, positions, columns + step))

    def forward_at(
        self, tokens: Tensor, positions: Tensor, columns: int, places: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Like :meth:`forward`, but writes K/V to the columns `places` (`[B, q]` int64) instead of those of the
        positions: for several chains of drafts per row. Of the columns after a row's first place a query sees those of
        its own chain (:class:`~.MaskPlan`). All runners run it eagerly: such forwards have many shapes.

        Returns:
            Logits `[B, q, vocab]`, and hidden states to pass to :meth:`call_listeners` (None: no listeners).
        """
        self.forwards += 1
        return self._run(tokens, positions, columns, places=places)

    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        columns: int,
        first_row: int = 0,
        places: Sequence[tuple[int, int]] = (),
        fed: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Like :meth:`forward`, but returns logits `[n, 1, vocab]` only at n `places`, pairs of row and token index of
        `tokens`. None without places. `fed`: tokens of each row before padding; None: all are."""
        self.forwards += 1
        kept_logits = 1  # few, if it can
        text = self._without_padding(tokens, fed)
        inputs, at_positions, rows = tokens, positions, None
        if text is not None:
            inputs, at_positions = tokens[text][None], positions[text][None]  # [1, T]
            rows = text.nonzero()[None, :, 0]  # [1, T]
            starts = [0, *accumulate(fed or ())]
            places = [(0, starts[row] + index) for row, index in places]

        def run() -> tuple[Tensor, Tensor | None]:
            logits, features = self._run(
                inputs, at_positions, columns, first_row, kept_logits, spans=self.uses_spans, rows=rows
            )
            if text is not None and features is not None:
                padded = features.new_zeros(*tokens.shape, features.shape[-1])  # [B, q, F]
                padded[text], features = features[0], padded
            return logits, features

        def undo() -> None:
            if self.cache.has_states and positions[:, 0].any():
                raise RuntimeError("the states of a row have taken in a part of its text")
            self.cache.forget(range(first_row, first_row + len(tokens)))

        if not places:
            _, features = attended(self, run, undo)
            if features is not None:
                self.call_listeners(features, positions, first_row)
            return None
        from_end = torch.tensor(places) - torch.tensor([0, inputs.shape[1]])  # the same after `logits_to_keep`
        kept_logits = -int(from_end[:, 1].min())
        at, thread = sent(from_end, tokens.device).unbind(1), get_ident()  # [n], [n]

        def narrow(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            # A drafter that learns in another thread uses the head too.
            return (inputs[0][at][:, None],) if get_ident() == thread else None  # [n, 1, hidden]

        head = self.network.get_output_embeddings()
        hook = None if head is None else head.register_forward_pre_hook(narrow)
        try:
            logits, features = attended(self, run, undo)
        finally:
            if hook is not None:
                hook.remove()
        if features is not None:
            self.call_listeners(features, positions, first_row)
        is_narrow = logits.shape[:2] == (len(places), 1)  # else the network has no head, or does not call it
        return logits if is_narrow else logits[at][:, None]

    def _without_padding(self, tokens: Tensor, fed: Sequence[int] | None) -> Tensor | None:
        """Where `tokens` `[B, q]` are text, `[B, q]` bool, to read it as one row; None: read them as they are."""
        return None

    def read_prompts(self, rows: Rows, admission: Admission) -> tuple[int, Tensor | None]:
        """Writes the K/V of admitted texts, computed or saved: prompts whole, equal prompts once; texts with generated
        tokens without the last one, which the first round feeds.

        Returns:
            The number of tokens read, and logits `[n, 1, vocab]` after the prompts of the n rows in
            `admission.first_token_rows`, or None.
        """
        lengths, leader_of = admission.cached, admission.first_token_rows
        known = admission.restore(TARGET, self.cache) if admission.saved else {}
        for row, saved in admission.saved.items():
            if saved.first:
                lengths[row - admission.first] = saved.first
        count, logits = sum(lengths[: admission.leaders]) - sum(known.values()), list[Tensor]()
        if admission.media or self.cache.offsets is not None:
            leaders = range(admission.first, admission.first + admission.leaders)
            prompts, tell = admission.media, self._tell_of_prompt
            seen, logits = read_media(self.network, self.cache, leaders, prompts, leader_of, lengths, tell)
            known |= seen
            self.forwards += len(seen)
            self.eager_forwards += len(seen)
        logits += self.read(rows, admission, lengths, known, leader_of.keys() - admission.media.keys())
        for row, saved in admission.saved.items():
            if saved.first:  # its K/V may have arrived meanwhile
                saved.restore(row, TARGET, self.cache)
        late = [row for row in admission.followers if leader_of[row] == row]
        # Logits of copies of prompts with media, the last ones, are known.
        ends = [admission.media[row].logits for row in late if row in admission.media] if admission.media else []
        if text := late[: len(late) - len(ends)]:
            logits += self._read_ends(rows, admission, text)
        logits += ends
        return count, torch.cat(logits) if logits else None

    def _read_ends(self, rows: Rows, admission: Admission, late: list[int]) -> list[Tensor]:
        """Reads the last prompt tokens of the rows `late`, copies of rows that were in flight before, for the logits
        after them. It reads them as prompts, for a step would sum in another order."""
        logits: list[Tensor] = []
        for is_short, group in groupby(range(late[0], late[-1] + 1), admission.ends_short):
            between = list(group)
            first, last = between[0], between[-1] + 1
            positions = rows.lengths[first:last, None] - 1  # [n, 1]
            longest = max(admission.lengths[first - admission.first : last - admission.first])
            tokens = rows.tokens[first:last].gather(1, positions)  # [n, 1]
            places = [(row - first, 0) for row in between if row in late]
            with nullcontext() if is_short else reading_prompts():
                ends = self.prefill(tokens, positions, longest, first, places)
            if ends is not None:
                logits.append(ends)
        return logits

    def read(
        self, rows: Rows, admission: Admission, lengths: list[int], known: Mapping[int, int],
        ends: Collection[int] = (),
    ) -> list[Tensor]:  # fmt: skip
        """Writes the K/V of the first `lengths` columns of the admitted rows, except the `known` first columns by row;
        returns logits `[n, 1, vocab]` of the last columns of leaders in `ends`."""
        logits, first = list[Tensor](), admission.first
        self.cache.reserve(lengths[: admission.leaders], first)
        self.cache.forget([row for row in range(first, first + len(lengths)) if not known.get(row)])
        most, queries = TOKENS_PER_FORWARD, QUERIES_PER_FORWARD
        if ends and self.network.get_output_embeddings() is None:  # a forward may then compute logits of all tokens
            vocabulary: int = self.network.config.get_text_config(decoder=True).vocab_size
            most = min(most, max(_LOGITS_PER_FORWARD // vocabulary, 1))
            queries = min(queries, most)
        leaders = zip(admission.requests[: admission.leaders], lengths, strict=False)
        pieces = [request.pieces(known.get(row, 0), end) for row, (request, end) in enumerate(leaders, first)]
        start = 0
        while start < admission.leaders:
            group, end, width, furthest = list(pieces[start]), start + 1, 0, 0
            # Prompts of one kind are read together, if padding stays within the rows; other texts piece by piece.
            together = len(group) == 1 and not group[0].generated
            while together and end < admission.leaders and len(pieces[end]) == 1:
                (piece,) = pieces[end]
                length = piece.end - piece.first
                width, furthest = max(width, group[0].end - group[0].first, length), max(furthest, piece.first)
                fits = (len(group) + 1) * width <= most and max(furthest, group[0].first) + width <= rows.columns
                in_order = width <= queries or width == length  # of rows, their logits come
                if not (fits and in_order) or piece[2:] != group[0][2:]:
                    break
                group.append(piece)
                end += 1
            for part in [group] if together else [[piece] for piece in group]:
                done = zip(range(start, end), part, strict=True)
                wanted = [n - start for n, piece in done if first + n in ends and piece.end == lengths[n]]
                logits += self._read_pieces(rows, first + start, part, wanted, queries)
            self.cache.trim(first + start, lengths[start:end])
            start = end
        if admission.followers:
            self.cache.copy_rows(admission.sources, admission.followers, lengths[admission.leaders :])
        return logits

    def _read_pieces(
        self, rows: Rows, first_row: int, pieces: list[Piece], wanted: list[int], most: int
    ) -> list[Tensor]:
        """Writes one piece of text for each row from `first_row` on, of one kind, at most `most` columns at once;
        returns logits `[n, 1, vocab]` after those that are `wanted`."""
        logits, generated = list[Tensor](), pieces[0].generated
        firsts, ends, *_ = zip(*pieces, strict=True)
        lengths = np.subtract(ends, firsts).tolist()
        offsets = sent(torch.tensor(firsts), rows.tokens.device)[:, None]  # [n, 1]
        texts = rows.tokens[first_row : first_row + len(pieces)]  # [n, columns]
        for begin in range(0, max(lengths), most):
            stop = min(begin + most, max(lengths))
            positions = offsets + torch.arange(begin, stop, device=offsets.device)  # [n, q]
            fed = [max(min(stop, length) - begin, 0) for length in lengths]
            self.cache.feeds(None if generated else fed)
            # Shorter rows feed scratch tokens after their text: masked now, overwritten later.
            places = [(row, lengths[row] - 1 - begin) for row in wanted if begin < lengths[row] <= stop]
            # Generated tokens are computed like steps, in the same order of sums.
            with nullcontext() if generated or pieces[0].short else reading_prompts():
                tokens, columns = texts.gather(1, positions), max(firsts) + stop
                read = self.prefill(tokens, positions, columns, first_row, places, fed)
            if generated:
                self.cache.commit(fed)
            if read is not None:
                logits.append(read)
        return logits

    def _tell_of_prompt(self, row: int) -> None:
        """Calls listeners with the hidden states of the forward that has read the whole prompt of `row`."""
        if self._stored:
            features = self._features()  # [1, length, F]
            self.call_listeners(features, torch.arange(features.shape[1], device=features.device)[None], row)

    def for_drafter(self, network: PreTrainedModel, shares_cache: bool, made_of: tuple[object, ...]) -> "EagerRunner":
        """Makes a runner of this kind for a drafter's `network`, over this cache or another one of the same size.

        `made_of`: as of :class:`~.NetworkDrafter`.
        """
        return EagerRunner(network, self._cache_for(network, shares_cache))

    def _cache_for(self, network: PreTrainedModel, shares_cache: bool) -> KVCache:
        if shares_cache:
            return self.cache.for_drafts()
        rows, columns, kind = self.cache.rows, self.cache.columns, Family.of(network)
        return self.cache.like(network) if kind.takes_pages else kind.cache.for_network(network, rows, columns)

    def for_features(self, network: nn.Module, layers: int, more: int) -> FeatureRunner:
        """Makes a runner of this kind for a drafter's `network` that reads hidden states, over a new cache with
        `layers` layers, and with `more` columns per row than this cache."""
        return FeatureRunner(network, self.cache.beside(layers, more))

    def listen(self, layers: Sequence[int], listener: Listener) -> None:
        """Registers `listener`, which is called with the hidden states of every further forward.

        `listener` gets features `[B, q, len(layers) * hidden]`, the states in the order of `layers` (see
        :func:`~.keep_states`), which are valid until the next forward, their
        positions `[B, q]`, and the first cache row. It must not raise: that would end the generation.

        Raises:
            ValueError: the network has no such layer.
        """
        if not set(layers) <= set(self._stored):
            wanted = dict.fromkeys(layer for others, _ in [*self._listeners, (layers, listener)] for layer in others)
            hooks = keep_states(self.network, wanted, self._states)
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._stored = hooks, tuple(wanted)
        self._listeners.append((tuple(layers), listener))

    @property
    def has_listeners(self) -> bool:
        """Whether a listener is registered."""
        return bool(self._listeners)

    def stop_listening(self, listener: Listener) -> None:
        """Unregisters `listener`. Hooks still store the states, so that captured forwards stay valid."""
        self._listeners = [each for each in self._listeners if each[1] != listener]

    def replay(self, network: PreTrainedModel, tokens: Tensor, positions: Tensor, cache: ReplayCache) -> Tensor:
        """Logits `[B, q, vocab]` of `network`, a copy of this runner's, for `tokens` at `positions` (`[B, q]` int64
        each) that continue `cache`; with gradient."""
        cache.point_at(positions)
        return network(
            input_ids=tokens,
            position_ids=self._position_ids(positions),
            attention_mask=self._masks.build(positions, cache.columns, network.dtype),
            use_cache=True,
            **{self._cache_argument: cache},
        ).logits

    def _position_ids(self, positions: Tensor, first_row: int = 0) -> Tensor:
        if self.cache.offsets is not None:
            positions = positions + self.cache.offsets[first_row : first_row + len(positions), None]  # [B, q]
        # Drafts of a row about to end may be past the last position. Their outputs are discarded, but a learned
        # position table must not be read out of range. RoPE has no last position.
        return positions if self._position_limit is None else positions.clamp(max=self._position_limit - 1)  # [B, q]

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        columns: int,
        first_row: int = 0,
        logits_to_keep: int = 0,
        spans: bool = False,
        places: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self.eager_forwards += 1
        columns = min(-(-columns // COLUMN_BUCKET) * COLUMN_BUCKET, self.cache.columns)
        if rows is None:
            self.cache.point_at(positions if places is None else places, columns, first_row)
        else:
            self.cache.point_at_texts(positions, rows, columns, first_row)
        dtype = autocast_dtype(tokens.device) or self.network.dtype
        keys = self.cache.key_positions
        spans = (spans or self.is_exact) and keys is None  # keys whose positions are not their columns need a mask
        # Attention of torch and of our C++ reads contiguous columns.
        table = self.cache.table_to_read(len(tokens)) if spans and self.uses_spans else None
        if spans:
            masks = self._masks.spans(positions, table, places, rows)
        else:
            masks = self._masks.build(positions, columns, dtype, places, keys)
        position_ids = self._position_ids(positions, first_row)
        return self._logits(tokens, position_ids, masks, logits_to_keep), self._features() if self._stored else None

    def _logits(self, tokens: Tensor, position_ids: Tensor, masks: Any, logits_to_keep: int) -> Tensor:
        with ExactSums() if self.is_exact else nullcontext():
            logits: Tensor = self.network(
                input_ids=tokens,
                position_ids=position_ids,
                attention_mask=masks,
                use_cache=True,
                **{self._cache_argument: self.cache},
                **({"logits_to_keep": logits_to_keep} if self._keeps_last_logits else {}),
            ).logits
        return logits

    def _features(self) -> Tensor:
        """`[B, q, len(layers) * hidden]` of the forward that just ran."""
        features = torch.cat([self._states[index] for index in self._stored], dim=-1)
        self._states.clear()
        return features

    def call_listeners(self, features: Tensor, positions: Tensor, first_row: int = 0) -> None:
        """Calls listeners with the hidden `features` of a forward over `positions` (`[B, q]` int64)."""
        states = features.chunk(len(self._stored), dim=-1)  # [B, q, hidden] each
        for layers, listener in self._listeners:
            is_all = layers == self._stored
            wanted = features if is_all else torch.cat([states[self._stored.index(layer)] for layer in layers], dim=-1)
            listener(wanted, positions, first_row)
