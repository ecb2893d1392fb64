"""Captures draft loops: launches the γ forwards and draws of a draft as one CUDA graph.

For a network that reads its target's hidden states, storing them is captured as well.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..drafter import Forward, NetworkDraft
from ..forwards.feature_runner import FeatureRunner, Over, TakeIn
from ..kv.base import KVCache
from ..kv.cache import autocast_dtype
from ..network.attention import takes_spans
from ..sampling.accept import Proposal
from ..sampling.penalty import NOTHING
from ..sampling.processors import Filters
from .graph_capture import (
    CapturedForward,
    ForwardKey,
    GraphBudget,
    Outputs,
    Recording,
    column_bucket,
    pad,
    row_bucket,
    uncached_autocast,
)


Record = Callable[[Callable[[], Outputs], Callable[[Recording], tuple[Tensor, Tensor]], str], tuple[Recording, int]]
"""Captures work and checks its scores against expected ones; returns the recording and its bytes."""


class _Key(NamedTuple):
    shape: ForwardKey
    known: int
    draft_length: int
    samples: bool
    drawn_by: Filters | None
    width: int  # of text; 0: without

    @classmethod
    def of(cls, draft: NetworkDraft, shape: ForwardKey) -> "_Key":
        width = 0 if draft.text is None else text_bucket(draft.text.shape[1])
        return cls(shape, draft.known, draft.draft_length, draft.noise is not None, draft.drawn_by, width)


def text_bucket(width: int) -> int:
    """Tokens of a text of `width` with padding: 1024 times a power of four, so that a text that grows is captured
    anew twice up to 16k. A step reads 70 bytes per token of it, and 6 or more per word of the vocabulary."""
    return max(1024, 1 << -(-(width - 1).bit_length() // 2) * 2)


@dataclass
class CapturedLoop:
    """A loop over static buffers, of a bucket of rows, without other references to the captured draft. Its results are
    in the buffers too: other captured work is replayed before they are read, and overwrites a capture's other memory.
    """

    tokens: Tensor  # [rows, known + γ]
    columns: Tensor  # [rows, known + γ - 1]
    keys: Tensor | None  # [rows, γ], of the noise
    scores: Tensor  # [rows, γ]
    text: Tensor | None  # [rows, width]
    filled: int  # rows of the buffers that a call has filled; the others have column 0
    recording: Recording | None = None
    bytes: int = 0  # of device memory

    @classmethod
    def over(cls, draft: NetworkDraft, rows: int, scores: Tensor) -> "CapturedLoop":
        """Makes a loop for `rows`, not recorded yet, filled with `draft`, which gave `scores` `[B, γ]`: the warm-up
        writes the same K/V."""
        keys = None if draft.noise is None else pad(draft.noise.keys[:, : draft.draft_length], rows)
        text = None
        if draft.text is not None:
            width = draft.text.shape[1]
            text = F.pad(pad(draft.text, rows), (0, text_bucket(width) - width), value=NOTHING)
        tokens, columns, scores = (pad(each, rows) for each in (draft.tokens, draft.columns, scores))
        return cls(tokens, columns, keys, scores, text, len(draft.tokens))

    def run(self, draft: NetworkDraft, forward: Forward) -> Outputs:
        """The loop of `draft` over the buffers: scores and tokens `[rows, γ]`."""
        noise = None if draft.noise is None or self.keys is None else draft.noise.over(self.keys)
        own = replace(draft, tokens=self.tokens, columns=self.columns, noise=noise, text=self.text)
        proposal = own.run(forward)
        assert proposal.scores is not None
        return self.scores.copy_(proposal.scores), self.tokens[:, draft.known :]

    def replay(self, draft: NetworkDraft) -> Proposal:
        """The same as `draft.run`; the result is valid until the next replay."""
        assert self.recording is not None
        rows, known = len(draft.tokens), draft.known
        self.tokens[:rows, :known] = draft.tokens[:, :known]
        self.columns[:rows] = draft.columns
        if self.keys is not None and draft.noise is not None:
            self.keys[:rows] = draft.noise.keys[:, : draft.draft_length]
        if self.text is not None and draft.text is not None:
            width = draft.text.shape[1]
            self.text[:rows, :width] = draft.text
            self.text[:rows, width:] = NOTHING  # of rows that were there before
        if self.filled > rows:
            self.columns[rows:] = 0  # so that free rows read one column, not many
        self.filled = rows
        self.recording.replay()
        return Proposal(self.tokens[:rows, known:], None, None, self.scores[:rows])


class CapturedLoops:
    """The captured loops of one network, for shapes that were used often enough."""

    def __init__(self) -> None:
        self._loops: dict[_Key, CapturedLoop] = {}
        self._asked: Counter[_Key] = Counter()

    def __len__(self) -> int:
        return len(self._loops)

    def get(self, draft: NetworkDraft, shape: ForwardKey) -> CapturedLoop | None:
        """Returns the captured loop of `draft`, or None."""
        return self._loops.get(_Key.of(draft, shape))

    def larger(self, draft: NetworkDraft, shape: ForwardKey) -> CapturedLoop | None:
        """Returns a larger captured loop that fits `draft`, or None."""
        fitting = [key for key in self._loops if key.shape.serves(shape) and key == _Key.of(draft, key.shape)]
        return self._loops[min(fitting, key=lambda key: key.shape)] if fitting else None

    def ask(self, draft: NetworkDraft, shape: ForwardKey) -> int:
        """Counts and returns the uses of this shape."""
        key = _Key.of(draft, shape)
        self._asked[key] += 1
        return self._asked[key]

    def capture(
        self, draft: NetworkDraft, shape: ForwardKey, expected: Proposal, forward: Forward, record: Record, name: str
    ) -> None:
        """Captures the loop of `draft`, which has just drafted `expected`, with `forward` of network `name`; warns on
        failure."""
        assert expected.scores is not None
        try:
            loop = CapturedLoop.over(draft, shape.rows, expected.scores)
            compared = partial(_up_to_the_first_other, expected)
            loop.recording, loop.bytes = record(partial(loop.run, draft, forward), compared, "those of single steps")
        except Exception as error:
            warnings.warn(
                f"the draft loop of {name} could not be captured and goes step by step for {shape.rows} rows x "
                f"{draft.draft_length} drafts, with the same tokens but slower: {type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            self._loops[_Key.of(draft, shape)] = loop

    def drop(self) -> list[int]:
        """Forgets all loops; returns their bytes."""
        taken = [loop.bytes for loop in self._loops.values()]
        self._loops.clear()
        self._asked.clear()
        return taken


def _up_to_the_first_other(expected: Proposal, recording: Recording) -> tuple[Tensor, Tensor]:
    """Returns scores `[B, γ]` of a replay, and those `expected`. After a token that differs (by rounding)
    both are set equal: later scores belong to another text."""
    assert expected.scores is not None and recording.features is not None
    same = recording.features[: len(expected.tokens)] == expected.tokens  # [B, γ]
    comparable = F.pad(same.long().cumprod(1), (1, -1), value=1).bool()  # [B, γ], the first different token included
    return recording.logits[: len(same)].where(comparable, expected.scores), expected.scores


class CapturedFeatures(FeatureRunner):
    """A :class:`FeatureRunner` that replays its rounds, as two graphs: one stores the features of a verification, for
    a number of rows and tokens; the other is the draft (:class:`CapturedLoops`).

    Args:
        network: of the drafter, on its final device and in its final dtype.
        cache: rows that pad a batch (:func:`row_bucket`) write into its free rows.
        budget: shared with the target.
        capture_after: uses of a shape before its capture.
        made_for: calls with an equal tuple reuse its captured forwards.

    Attributes:
        in_use: whether this generation uses it.
    """

    def __init__(
        self,
        network: nn.Module,
        cache: KVCache,
        budget: GraphBudget,
        capture_after: int,
        made_for: tuple[object, ...],
    ) -> None:
        super().__init__(network, cache)
        self.budget, self.made_for = budget, made_for
        self.in_use = False
        self._capture_after = capture_after
        weight = next(network.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self.uses_spans = takes_spans(self._device, self._dtype)
        self._intakes: dict[ForwardKey, CapturedForward] = {}
        self._asked: Counter[ForwardKey] = Counter()
        self._loops = CapturedLoops()

    def drop_graphs(self) -> None:
        for taken in (*(intake.bytes for intake in self._intakes.values()), *self._loops.drop()):
            self.budget.give_back(taken)
        self._intakes.clear()
        self._asked.clear()

    def take_in_round(self, features: Tensor, positions: Tensor, keep: TakeIn) -> None:
        key = ForwardKey(row_bucket(len(positions), self.cache.rows), positions.shape[1], 0, None)
        intake = self._intakes.get(key)
        if intake is not None:
            intake.fill(features, positions)
            intake.recording.replay()
            return
        super().take_in_round(features, positions, keep)
        if not self.budget.allows_more():
            return
        self._asked[key] += 1
        if self._is_due(self._asked[key]):
            self._capture_intake(key, features, positions, keep)

    def draft(self, draft: NetworkDraft, over: Over, columns: int) -> Proposal:
        """Like the eager runner's. Tensors of a captured loop are valid until the same shape drafts again."""
        if draft.drawn_by is None:
            return super().draft(draft, over, columns)
        visible = self.cache.columns if self.uses_spans else column_bucket(columns, self.cache.columns)
        rows = row_bucket(len(draft.tokens), self.cache.rows)
        shape = ForwardKey(rows, draft.known, visible, autocast_dtype(self._device))
        loop = self._loops.get(draft, shape)
        if loop is not None:
            return loop.replay(draft)
        proposal = super().draft(draft, over, columns)
        if self.budget.allows_more() and self._is_due(self._loops.ask(draft, shape)):
            record = partial(self._record, shape.autocast)
            self._loops.capture(draft, shape, proposal, over(visible), record, type(self.network).__name__)
        return proposal

    def _capture_intake(self, key: ForwardKey, features: Tensor, positions: Tensor, keep: TakeIn) -> None:
        # Filled with this call: the warm-up writes the same values.
        buffers = pad(features, key.rows), pad(positions, key.rows)  # [rows, q, F], [rows, q]
        expected = self._newest(positions)

        def work() -> Outputs:
            self.take_in(*buffers, 0, keep)
            return self._newest(buffers[1]), None

        def compared(recording: Recording) -> tuple[Tensor, Tensor]:
            return recording.logits[: len(expected)], expected

        try:
            recording, taken = self._record(None, work, compared, "what was taken in eagerly")
        except Exception as error:
            warnings.warn(
                f"what {type(self.network).__name__} takes in of its target could not be captured and is computed "
                f"eagerly for {key.rows} rows x {key.queries} tokens, with the same tokens but slower: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            self._intakes[key] = CapturedForward(key, *buffers, recording, taken, len(positions))

    def _newest(self, positions: Tensor) -> Tensor:
        """`[B, q, n]`: content of the last layer of the cache at `positions` `[B, q]`."""
        return self.cache.keys_at(-1, positions).flatten(2)

    def _is_due(self, asked: int) -> bool:
        if asked > self._capture_after:  # that failed
            return False
        self.budget.preparations += 1
        return asked == self._capture_after

    def _record(
        self,
        autocast: torch.dtype | None,
        work: Callable[[], Outputs],
        compared: Callable[[Recording], tuple[Tensor, Tensor]],
        whose: str,
    ) -> tuple[Recording, int]:
        # The target's features are taken in between its verification and the commit of its states.
        return self.budget.record_checked(
            uncached_autocast(self._device, autocast, work), compared, whose, self._dtype, apart=True
        )
