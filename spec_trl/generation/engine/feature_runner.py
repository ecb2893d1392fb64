"""Runs a network that reads its target's hidden states: takes these in, and drafts."""

from collections.abc import Callable

from torch import Tensor, nn

from .accept import Proposal
from .cache import RaggedCache
from .draft_loop import Forward, NetworkDraft


TakeIn = Callable[[Tensor, Tensor], None]
"""Writes what the network keeps of features `[B, q, F]` at positions `[B, q]` to its cache, which points there."""
Over = Callable[[int], Forward]
"""The forwards of one draft, which attend over the first so many columns."""


class FeatureRunner:
    """Runs it eagerly.

    Args:
        network: of the drafter.
        cache: its own, with what it keeps of the features.
    """

    uses_spans = False
    """Whether drafts attend under spans (:meth:`~spec_trl.generation.engine.attention.MaskPlan.spans`)."""

    def __init__(self, network: nn.Module, cache: RaggedCache) -> None:
        self.network, self.cache = network, cache

    def take_in(self, features: Tensor, positions: Tensor, first_row: int, keep: TakeIn) -> None:
        """Has `keep` write what a forward of the target over the rows from `first_row` on has shown."""
        self.cache.point_at(positions, 0, first_row)
        self.cache.table_to_read(len(positions))  # nothing is read: no pages need to be gathered
        keep(features, positions)

    def take_in_round(self, features: Tensor, positions: Tensor, keep: TakeIn) -> None:
        """The same for a round, in which all rows in flight are verified."""
        self.take_in(features, positions, 0, keep)

    def draft(self, draft: NetworkDraft, over: Over, columns: int) -> Proposal:
        """Drafts, with attention over columns `0..columns`."""
        return draft.run(over(columns))
