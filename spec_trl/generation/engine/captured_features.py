"""Drafts of a network that reads its target's hidden states, and what it takes in of them, as captured graphs."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .accept import Proposal
from .attention import takes_spans, warn_of_masks
from .cache import RaggedCache, autocast_dtype
from .captured_drafts import CapturedLoops
from .captured_forward import CapturedForward, ForwardKey, column_bucket, pad, row_bucket, uncached_autocast
from .cuda_graphs import GraphBudget, Outputs, Recording
from .draft_loop import NetworkDraft
from .feature_runner import FeatureRunner, Over, TakeIn


class CapturedFeatures(FeatureRunner):
    """A :class:`FeatureRunner` that replays its rounds. Each is two graphs: one takes in what verification has shown,
    for a number of rows and tokens; one is the draft (:class:`CapturedLoops`).

    Args:
        network: of the drafter, on the device and in the dtype that it keeps.
        cache: rows that pad a batch (:func:`row_bucket`) write into its free rows.
        budget: shared with the target.
        capture_after: times that a shape is asked for before it is captured.
        made_for: calls with the same are served by what it captured.

    Attributes:
        in_use: in this generation.
    """

    def __init__(
        self,
        network: nn.Module,
        cache: RaggedCache,
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
        """Frees what was captured."""
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
        if not self.budget.has_room():
            return
        self._asked[key] += 1
        if self._is_due(self._asked[key]):
            self._capture_intake(key, features, positions, keep)

    def draft(self, draft: NetworkDraft, over: Over, columns: int) -> Proposal:
        """As the eager runner's; where it was captured, its tensors hold until the same shape drafts again."""
        if draft.drawn_by is None:
            return self._draft_eagerly(draft, over, columns)
        visible = self.cache.columns if self.uses_spans else column_bucket(columns, self.cache.columns)
        rows = row_bucket(len(draft.tokens), self.cache.rows)
        shape = ForwardKey(rows, draft.known, visible, autocast_dtype(self._device))
        loop = self._loops.get(draft, shape)
        if loop is not None:
            return loop.replay(draft)
        proposal = self._draft_eagerly(draft, over, columns)
        if self.budget.has_room() and self._is_due(self._loops.ask(draft, shape)):
            record = partial(self._record, shape.autocast)
            self._loops.capture(draft, shape, proposal, over(visible), record, type(self.network).__name__)
        return proposal

    def _draft_eagerly(self, draft: NetworkDraft, over: Over, columns: int) -> Proposal:
        try:
            return super().draft(draft, over, columns)
        except Exception as error:
            if not self.uses_spans or isinstance(error, torch.OutOfMemoryError):
                raise
            self.uses_spans = False
            warn_of_masks(self.network, error)
            return super().draft(draft, over, columns)

    def _capture_intake(self, key: ForwardKey, features: Tensor, positions: Tensor, keep: TakeIn) -> None:
        """Captures what was just taken in; goes on without it, with a warning, where that fails."""
        # Filled with this very call: warming up writes what it wrote.
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
        """`[B, q, n]`: what the last layer of the cache holds at `positions` `[B, q]`."""
        return self.cache.keys_at(-1, positions).flatten(2)

    def _is_due(self, asked: int) -> bool:
        """Whether what was asked for so often is captured now."""
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
        return self.budget.record_checked(
            uncached_autocast(self._device, autocast, work), compared, whose, self._dtype
        )
