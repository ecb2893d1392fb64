"""Trains drafters on the rounds that they drafted, replayed with gradients on a canvas.

Inference kernels carry no gradient (TTS App. C.3), and caches are written in place: drafting runs without gradient,
and an update replays the round from a :class:`Canvas` on plain modules.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..engine.drafter import Drafter
from ..engine.kv.base import KVCache
from ..engine.kv.cache import ReplayCache
from ..engine.rows import Integers
from ..options import SpeculativeConfig


@dataclass(frozen=True)
class Canvas:
    """Inputs and drafts of one round: x_{t+1:t+C} after x_{1:t} (TTS §4).

    Args:
        lengths: `[B]` int64, committed tokens n by row; the newest is in column n - 1.
        tokens: `[B, context + 1 + γ]` int64, the newest `context + 1` committed tokens and the drafts:

                column   n-1-context .. n-2 | n-1 | n .. n-1+γ
                         context            | x_t | drafts

        features: `[B, context, F]` of the target at the context's columns; None: the drafter reads none.
        columns: number of columns of the K/V, with room for the drafts.
        keys_values: K and V `[B, kv_heads, columns, d]` by layer; scratch from a row's column n - 1 on.
    """

    lengths: Tensor
    tokens: Tensor
    features: Tensor | None
    columns: int
    keys_values: list[tuple[Tensor, Tensor]]

    @property
    def context(self) -> int:
        """Number of columns with features before the newest committed token."""
        return 0 if self.features is None else self.features.shape[1]

    @property
    def draft_length(self) -> int:
        """γ."""
        return self.tokens.shape[1] - self.context - 1

    def columns_after(self, offset: int, count: int) -> Tensor:
        """`[B, count]` int64: columns n + offset .. of the rows; the last column, unread by replays, replaces
        columns before a row's start."""
        columns = self.lengths[:, None] + torch.arange(offset, offset + count, device=self.lengths.device)
        return columns.where(columns >= 0, self.columns - 1)

    def tokens_after(self, offset: int, count: int) -> Tensor:
        """`[B, count]` int64: the tokens in `columns_after(offset, count)`."""
        first = self.context + 1 + offset
        return self.tokens[:, first : first + count]

    def cache(self) -> ReplayCache:
        """A cache on the canvas's K/V, for a replay to write to."""
        return ReplayCache(self.keys_values, self.columns)

    @property
    def bytes(self) -> int:
        held = [self.tokens, *(part for pair in self.keys_values for part in pair)]
        return sum(tensor.nbytes for tensor in held) + (0 if self.features is None else self.features.nbytes)


class TrainableDrafter(Drafter):
    """A drafter with a network and replayable rounds."""

    network: nn.Module
    cached: Integers | None = None
    """`[capacity]` on the host: number of tokens of each row whose K/V it has computed; None: it counts none."""
    width: int
    """Width of the network's hidden states."""
    cache: KVCache
    """K/V that it drafts from; during a generation."""
    target_ids: Tensor | None = None
    """`[draft vocabulary]` int64, the target's token by token of the drafter; None: they are the same."""
    weight_rate: float = 0.08
    """Default η of Adam, times the width: 3e-4 at width 256, and 2e-5 at 4096, where a unit has more inputs; published
    online training of drafters uses 1e-6 to 1e-3."""
    learned_context: int = 0
    """Number of columns before a round whose K/V a replay computes again, with gradient."""
    context: int = 0
    """The same if the drafter learns, else 0: then no features are stored for replays."""
    attended_layers: int | None = None
    """End of the layers of the cache that replays read, as of a slice; None: all."""

    @classmethod
    def make_student(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "TrainableDrafter":
        """Makes a drafter for `"tts"` with weights of its own; arguments and errors as of `make`."""
        return cls.make(model, assistant, config)

    def computed(self, row: int) -> int:
        """Number of first columns of `row` with K/V computed from committed text; 0 where it counts none."""
        return 0 if self.cached is None else min(int(self.cached[row]), int(self.session.rows.host_lengths[row]) - 1)

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        if self.cached is not None:
            self.cached[destination] = self.cached[source]

    @abstractmethod
    def replay(self, network: Any, canvas: Canvas) -> Tensor:
        """Computes raw logits `[B, C, draft vocabulary]` of a round's first C <= γ draft tokens again, with gradient,
        by this drafter's `network` or a copy."""

    @abstractmethod
    def trained(self, network: Any) -> list[nn.Parameter]:
        """The parameters of `network`, this drafter's or a copy, that learning may change."""

    @abstractmethod
    def projections(self, network: Any) -> dict[str, nn.Module]:
        """The layers of `network`, by name, that low-rank adapters can correct."""

    def columns_of_replay(self, draft_length: int) -> int:
        """Number of columns from a row's newest token on that a replay writes to."""
        return draft_length

    def position_weights(self, count: int) -> list[float]:
        """w_k, k = 1..count (TTS §4.1): later drafts are accepted less often. EAGLE-3's training: 0.8^(k - 1)."""
        return [0.8**k for k in range(count)]

    def canvas(self, draft_length: int, snapshot: bool) -> Canvas:
        """Returns the canvas of the round just drafted and verified, not yet committed; a `snapshot` copies K/V."""
        rows = self.session.rows
        columns = rows.longest + self.columns_of_replay(draft_length)
        features = self.context_features()
        context = 0 if features is None else features.shape[1]
        where = rows.columns_after(-1 - context, context + 1 + draft_length).clamp(min=0)
        pairs = [
            layer.read(0, rows.active, columns)
            if layer.is_initialized  # else a layer without attention
            else (rows.tokens[:0], rows.tokens[:0])
            for layer in self.cache.layers[: self.attended_layers]
        ]
        if snapshot:
            pairs = [(keys.clone(), values.clone()) for keys, values in pairs]
        return Canvas(rows.lengths.clone(), rows.tokens[: rows.active].gather(1, where), features, columns, pairs)

    def context_features(self) -> Tensor | None:
        """`[B, context, F]` of the columns before a round, a copy."""
        return None
