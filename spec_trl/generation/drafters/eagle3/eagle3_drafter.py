"""Drafts with EAGLE-3 (arXiv 2503.01840): one layer over the target's hidden states."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...engine.drafter import DraftSession, Forward
from ...engine.kv.memory import sent
from ...engine.network.attention import FULL, MaskPlan, as_spans, attended
from ...engine.rows import Admission, Integers
from ...registry import register_drafter
from ..autoregressive import CATCH_UP
from ..feature_drafter import FeatureDrafter
from ..trainable_drafter import Canvas
from .eagle3_network import Eagle3Config, Eagle3Network


_PROMPT_PAIRS = 8192  # pairs per forward, padding included: bounds activations and masks
CAUSAL = MaskPlan((FULL,), per_type=False, sliding_window=0, chunk_size=0)


@register_drafter
class Eagle3Drafter(FeatureDrafter):
    """Drafts with an EAGLE-3 checkpoint of SafeAILab's format (AngelSlim, SpecForge) or of speculators'.

    Column i of its K/V cache holds the pair of token i + 1 and the target's features at column i, and its output
    drafts token i + 2. The features of a row of n tokens end at column n - 2 (verification reads the newest token), so
    the pair n - 2 drafts the first token, and further pairs read the network's output:

        column        0     1     2     3 = n - 2    4           5
        token         x1    x2    x3    x4           d1          d2
        state         r0    r1    r2    r3           h3          h4          r: projected features, h: fed back
        drafts                          d1           d2          d3

    Real pairs overwrite fed-back ones once the target's features exist. The projected features are in a layer of the
    cache after that of the K/V.
    """

    strategy = "eagle3"
    network: Eagle3Network
    cached: Integers
    network_type = Eagle3Network
    renames = {"model.midlayer.": "layers.0.", "midlayer.": "layers.0.", "model.": ""}
    lag = 1  # a row of one token has no features yet
    attended_layers = -1  # the last one holds features
    casts_weights = False

    def parse(self, settings: Mapping[str, Any], target: PreTrainedConfig) -> Eagle3Config:
        fc = self._stored.get("fc.weight", torch.empty(1, 1))
        if fc.shape[-1] == 2 * len(fc) and "layers.0.hidden_norm.weight" not in self.stored_names:
            raise ValueError("fc reads a state and an embedding: it is a drafter of EAGLE 1 or 2, not of 3.")
        layers = {match[1] for name in self.stored_names if (match := re.match(r"layers\.(\d+)\.", name))}
        return Eagle3Config.parse(settings, target.num_hidden_layers, len(layers))

    def begin(self, session: DraftSession) -> None:
        self.cached = np.zeros(session.rows.capacity, np.int64)  # pairs read, by row
        super().begin(session)

    def feed_texts(self, admission: Admission, known: Mapping[int, int]) -> None:
        rows, end = self.session.rows, admission.first + admission.leaders
        pairs = (rows.host_lengths[admission.first :] - 1).tolist()[: admission.leaders]  # by row
        firsts = torch.tensor([known.get(row, 0) for row in range(admission.first, end)])  # [n]
        if pairs:
            lacking = int((torch.tensor(pairs) - firsts).max())
            offsets = sent(firsts, rows.tokens.device)[:, None]  # [n, 1]
            width = max(_PROMPT_PAIRS // len(pairs), CATCH_UP)
            for start in range(0, lacking, width):
                stop = min(start + width, lacking)
                columns = offsets + torch.arange(start, stop, device=offsets.device)  # [n, q]
                # Shorter rows read scratch after their prompt: masked now, overwritten later.
                columns.clamp_(max=rows.columns - 2)
                self._feed(columns, int(firsts.max()) + stop, first_row=admission.first)
        self.cached[admission.first : rows.active] = rows.host_lengths[admission.first :] - 1

    def observe(self, tokens: Integers, counts: Integers) -> None:
        if self.failure is not None:  # even without a next draft
            raise self.failure

    def stored_states(self) -> list[tuple[Tensor, Tensor]]:
        weight = self.network.fc.weight
        return [*super().stored_states(), (weight.new_empty(1, 1, 0, self.width), weight.new_empty(1, 1, 0, 0))]

    def take_features(self, features: Tensor, positions: Tensor) -> None:
        states = self.network.project(features)[:, None]  # [B, 1, q, H]
        self.cache.layers[-1].update(states, states[..., :0])

    def reach(self, count: int) -> int:
        return count - 2

    def catch_up(self, count: int) -> int:
        # As many pairs as a round of as many drafts, so that rounds are alike; rows that lack fewer read some again
        # and write the same K/V. After rounds without its drafts there may be more.
        rows, known = self.session.rows, count + 1
        missing = int((rows.host_lengths - 1 - self.cached[: rows.active]).max())
        self.cached[: rows.active] = rows.host_lengths - 1
        while missing > known:
            fed = min(missing - known, CATCH_UP)
            self._feed(rows.columns_after(-1 - missing, fed).clamp(min=0), rows.longest - 1)
            missing -= fed
        return known

    def forward_over(self, columns: int, count: int) -> Forward:
        h = torch.empty(0)  # [B, 1, H], of the step before

        def forward(tokens: Tensor, pairs: Tensor, step: int) -> Tensor:
            nonlocal h
            with self.own_dtype():
                states = self.network.fed_back(h) if step else self._states(pairs)  # [B, q, H]
                h = self._run(tokens, pairs, states, columns)[:, -1:]
            return self.scores(self.network, h)

        return forward

    def scores(self, network: Eagle3Network, h: Tensor) -> Tensor:
        """Logits `[..., draft vocabulary]` of h `[..., H]`, by `network`, this drafter's or a copy."""
        with self.own_dtype():
            return network.logits(h, self._head)

    @property
    def column_bytes(self) -> float:
        return super().column_bytes + self.width * self.network.dtype.itemsize

    def replay(self, network: Eagle3Network, canvas: Canvas) -> Tensor:
        assert canvas.features is not None
        cache = canvas.cache()

        def feed(columns: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
            cache.point_at(columns)
            mask = CAUSAL.build(columns, canvas.columns, network.dtype)  # [B, 1, q, columns]
            # `network` may be a copy of the drafting network in a wider dtype.
            return network(network.embed(tokens, self.embeddings), states, columns, mask, cache.update)

        context = canvas.context
        states = network.project(canvas.features.to(network.dtype))  # [B, context, H]
        h = feed(canvas.columns_after(-1 - context, context), canvas.tokens_after(-context, context), states)[:, -1:]
        logits = [self.scores(network, h)]  # [B, 1, draft vocabulary] each
        for step in range(canvas.draft_length - 1):
            h = feed(canvas.columns_after(step - 1, 1), canvas.tokens_after(step, 1), network.fed_back(h))  # [B, 1, H]
            logits.append(self.scores(network, h))
        return torch.cat(logits, dim=1)

    def _states(self, columns: Tensor, first_row: int = 0) -> Tensor:
        """The projected features `[B, q, H]` in `columns` `[B, q]` of the rows from `first_row` on."""
        return self.cache.keys_at(-1, columns, first_row)[:, :, 0]

    def _feed(self, columns: Tensor, visible: int, first_row: int = 0) -> None:
        """Runs the pairs of committed tokens in `columns` (`[B, q]`) over the cache's first columns, for their K/V."""
        self.forwards += 1
        rows = torch.arange(first_row, first_row + len(columns), device=columns.device)[:, None]  # [B, 1]
        tokens = self.session.rows.tokens[rows, columns + 1]  # [B, q]
        states = self._states(columns, first_row)
        attended(self._runner, lambda: self._run(tokens, columns, states, visible, first_row))

    def _run(self, tokens: Tensor, columns: Tensor, states: Tensor, visible: int, first_row: int = 0) -> Tensor:
        """h `[B, q, H]` of pairs of `tokens` `[B, q]` and `states` `[B, q, H]` in `columns` `[B, q]`."""
        embedded = self.network.embed(tokens, self.embeddings)  # [B, q, H]
        visible = self.point_at(columns, visible, first_row)
        mask: Tensor | dict[str, Tensor]
        if self._runner.uses_spans:
            mask = as_spans(torch.zeros_like(columns), columns, self.cache.table_to_read(len(columns)))
        else:
            mask = CAUSAL.build(columns, visible, self.network.dtype)  # [B, 1, q, visible]
        with self.own_dtype():
            return self.network(embedded, states, columns, mask, self.cache.update)
