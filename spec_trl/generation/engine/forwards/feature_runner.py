"""Forwards of the network of a drafter that reads hidden states."""

from collections.abc import Callable

from torch import Tensor, nn

from ..drafter import Forward, NetworkDraft
from ..kv.base import KVCache
from ..network.attention import attended
from ..sampling.accept import Proposal


TakeIn = Callable[[Tensor, Tensor], None]
"""Stores features `[B, q, F]` at positions `[B, q]` in the network's cache, which points there."""
Over = Callable[[int], Forward]
"""Runs the forwards of one draft, with attention over the first columns, up to this number."""


class FeatureRunner:
    """Runs the network of a drafter that reads its target's hidden states, eagerly.

    Args:
        network: of the drafter.
        cache: of the network, with the stored features.
    """

    is_exact = False
    uses_spans = False
    """Whether texts and drafts attend under spans (:meth:`~.MaskPlan.spans`)."""

    def __init__(self, network: nn.Module, cache: KVCache) -> None:
        self.network, self.cache = network, cache

    def take_in(self, features: Tensor, positions: Tensor, first_row: int, keep: TakeIn) -> None:
        """Calls `keep` to store the features of a forward of the target over the rows from `first_row` on."""
        self.cache.point_at(positions, 0, first_row)
        self.cache.table_to_read(len(positions))  # nothing is read: no pages are gathered
        keep(features, positions)

    def take_in_round(self, features: Tensor, positions: Tensor, keep: TakeIn) -> None:
        """The same for a round, which verifies all rows in flight."""
        self.take_in(features, positions, 0, keep)

    def draft(self, draft: NetworkDraft, over: Over, columns: int) -> Proposal:
        """Drafts, with attention over columns `0..columns`."""
        return attended(self, lambda: draft.run(over(columns)))
