"""EAGLE-3 as drafter (Li et al. 2025, arXiv 2503.01840): one layer over the target's hidden states."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...engine.attention import FULL, MaskPlan
from ...engine.drafter import DraftSession
from ...engine.memory import PagedZeros, check_memory, takes_pages
from ...engine.outcome import Integers
from ...engine.rows import Admission
from ..autoregressive import CATCH_UP
from ..canvas import Canvas
from ..feature_drafter import FeatureDrafter
from .config import Eagle3Config
from .network import Eagle3Network


_PROMPT_PAIRS = 8192  # fed at once, padding included: bounds activations and masks
CAUSAL = MaskPlan((FULL,), per_type=False, sliding_window=0, chunk_size=0)


class Eagle3Drafter(FeatureDrafter):
    """Drafts with an EAGLE-3 checkpoint of SafeAILab's format (AngelSlim, SpecForge) or of speculators'.

    Column i of its K/V cache holds the pair of token i + 1 and the target's features at column i, and its output
    drafts token i + 2. The features of a row of n tokens end at column n - 2 (verification feeds the newest token), so
    the pair n - 2 drafts the first token, and further pairs read the network's own output:

        column        0     1     2     3 = n - 2    4           5
        token         x1    x2    x3    x4           d1          d2
        state         r0    r1    r2    r3           h3          h4          r: projected features, h: fed back
        drafts                          d1           d2          d3

    Real pairs overwrite what was fed back once the target's features are there.
    """

    strategy = "eagle3"
    network: Eagle3Network
    network_type = Eagle3Network
    renames = {"midlayer.": "layers.0."}
    least_tokens = 2  # a row of one token has no features yet

    def parse(self, settings: Mapping[str, Any], target: PreTrainedConfig) -> Eagle3Config:
        return Eagle3Config.parse(settings, target.num_hidden_layers)

    def begin(self, session: DraftSession) -> None:
        rows, dtype, device = session.rows, self.network.dtype, session.rows.tokens.device
        count = 1 if takes_pages(device) else rows.capacity
        what = f"the EAGLE-3 drafter's features of {count} rows x {rows.columns} columns"
        check_memory(what, count * rows.columns * self.width * dtype.itemsize, device)
        self._buffer = PagedZeros((rows.capacity, 1, rows.columns, self.width), dtype, device)
        self._projected = self._buffer.tensor[:, 0]  # [capacity, columns, H]
        # Pairs of each row whose K/V was computed from the target's features: [capacity]
        self._cached = torch.zeros(rows.capacity, dtype=torch.int64, device=device)
        self._missing = 0  # bound on the number of pairs that any row lacks, known without asking the device
        self._heard = 0  # width of the target's last forward
        super().begin(session)

    def end(self) -> None:
        super().end()
        del self._buffer, self._projected, self._cached

    def admit(self, admission: Admission) -> None:
        rows = self.session.rows
        pairs = (rows.lengths[admission.first :] - 1).tolist()
        leaders = pairs[: admission.leaders]
        if leaders:
            width = max(_PROMPT_PAIRS // len(leaders), CATCH_UP)
            for start in range(0, max(leaders), width):
                stop = min(start + width, max(leaders))
                columns = torch.arange(start, stop, device=rows.tokens.device).expand(len(leaders), -1)  # [n, q]
                # Shorter rows feed scratch after their prompt: masked now, overwritten later.
                self._feed(columns, stop, first_row=admission.first)
            for row, count in enumerate(leaders, admission.first):
                self._buffer.give_back(row, row + 1, count)
        super().admit(admission)
        self._cached[admission.first : rows.active] = rows.lengths[admission.first :] - 1

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        super().move(source, destination, columns)
        for row in destination:
            self._buffer.give_back(row, row + 1)
        self._copy_features(source, destination, columns)
        self._buffer.give_back(self.session.rows.active, self.session.rows.capacity)
        self._cached[destination] = self._cached[source]

    def copy_rows(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        super().copy_rows(source, destination, columns)
        self._copy_features(source, destination, columns)

    def _copy_features(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        for row, to, count in zip(source, destination, columns, strict=True):
            self._projected[to, :count] = self._projected[row, :count]

    def observe(self, tokens: Integers, kept: Integers) -> None:
        if self.failure is not None:  # also where it is not asked to draft again
            raise self.failure
        self._missing += self._heard  # no row gained more than was verified

    def take_features(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        self._heard = positions.shape[1]
        rows = torch.arange(first_row, first_row + len(positions), device=positions.device)[:, None]  # [B, 1]
        self._projected[rows, positions] = self.network.project(features)  # [B, q, H]

    def draft_logits(self, count: int) -> Iterator[Tensor]:
        rows = self.session.rows
        h = self._catch_up()  # [B, 1, H]
        for step in range(count):
            with self.own_dtype():
                logits, states = self.network.logits(h), self.network.fed_back(h)
            yield logits
            if step + 1 < count:
                h = self._feed(rows.columns_after(step - 1, 1), rows.longest + step, states=states)

    @property
    def cache_bytes(self) -> int:
        return super().cache_bytes + self._buffer.bytes_of(self.session.most_columns)

    @property
    def column_bytes(self) -> float:
        return super().column_bytes + self.width * self.network.dtype.itemsize

    def replay(self, network: Eagle3Network, canvas: Canvas) -> Tensor:
        assert canvas.features is not None
        cache = canvas.cache()

        def feed(columns: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
            cache.point_at(columns)
            mask = CAUSAL.build(columns, canvas.columns, network.dtype)  # [B, 1, q, columns]
            # The network's own dtype counts: it may be a wider copy of the one that drafts.
            return network(network.embed(tokens, self.embeddings), states, columns, mask, cache.update)

        context = canvas.context
        states = network.project(canvas.features.to(network.dtype))  # [B, context, H]
        h = feed(canvas.columns_after(-1 - context, context), canvas.tokens_after(-context, context), states)[:, -1:]
        logits = [network.logits(h)]  # [B, 1, draft vocabulary] each
        for step in range(canvas.draft_length - 1):
            h = feed(canvas.columns_after(step - 1, 1), canvas.tokens_after(step, 1), network.fed_back(h))  # [B, 1, H]
            logits.append(network.logits(h))
        return torch.cat(logits, dim=1)

    def _catch_up(self) -> Tensor:
        """Feeds the pairs that the cache lacks, up to the newest; returns its output h `[B, 1, H]`."""
        rows = self.session.rows
        if self._missing > CATCH_UP:  # after rounds in which it did not draft the bound is loose
            self._missing = int((rows.lengths - 1 - self._cached[: rows.active]).max())
        # Rows that lack fewer feed some pairs again, which rewrites the same K/V.
        missing, self._missing = max(self._missing, 1), 0
        self._cached[: rows.active] = rows.lengths - 1
        while missing > CATCH_UP:
            self._feed(rows.columns_after(-1 - missing, CATCH_UP).clamp(min=0), rows.longest - 1)
            missing -= CATCH_UP
        return self._feed(rows.columns_after(-1 - missing, missing).clamp(min=0), max(rows.longest - 1, 1))[:, -1:]

    def _feed(self, columns: Tensor, visible: int, first_row: int = 0, states: Tensor | None = None) -> Tensor:
        """Runs the pairs of `columns` (`[B, q]`) over the cache's first columns, with the projected features or other
        `states` (`[B, q, H]`); returns h `[B, q, H]`."""
        self.forwards += 1
        rows = torch.arange(first_row, first_row + len(columns), device=columns.device)[:, None]  # [B, 1]
        embedded = self.network.embed(self.session.rows.tokens[rows, columns + 1], self.embeddings)  # [B, q, H]
        if states is None:
            states = self._projected[rows, columns]  # [B, q, H]
        visible = self.point_at(columns, visible, first_row)
        mask = CAUSAL.build(columns, visible, self.network.dtype)  # [B, 1, q, visible]
        with self.own_dtype():
            return self.network(embedded, states, columns, mask, self.cache.update)
