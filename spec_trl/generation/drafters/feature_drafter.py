"""What drafters that were trained on a target's hidden states have in common."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...scheduling.draft_length import MAX_DRAFT_LENGTH
from ..engine.drafter import DraftCost, DraftSession
from ..engine.rows import Admission
from .canvas import TrainableDrafter


class LearnedDrafter(TrainableDrafter):
    """Drafts from the hidden states that the target's runner tells (`EagerRunner.listen`).

    Attributes:
        feature_layers: which hidden states of the target it reads, side by side, in transformers' count.
        position_limit: tokens that its scaled positions reach; None: RoPE without scaling goes on.
        target_ids: `[draft vocabulary]` int64, the target's token for each of the drafter's; None: they are the same.
    """

    has_probabilities = True
    learned_context = 16
    feature_layers: tuple[int, ...]
    position_limit: int | None
    target_ids: Tensor | None
    _vocabulary: int  # the target's

    def check_length(self, columns: int) -> None:
        if self.position_limit is not None and columns > self.position_limit:
            raise ValueError(
                f"rows can reach {columns} tokens, drafts included, and the {self.strategy} drafter's scaled "
                f"positions reach {self.position_limit} (max_position_embeddings). Lower max_new_tokens, or use a "
                "drafter with a longer context."
            )

    def prepare_assisted_decoding(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: transformers' own loop does not show the target's hidden states.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"a {type(self).__name__} needs the target's hidden states, which transformers' assisted loop does not "
            f'hand over. Generate with assistant_strategy="{self.strategy}".'
        )

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        self._recent: Tensor | None = None  # [capacity, ring + 1, F]
        self._prompt_ends: Tensor | None = None  # [capacity, context, F]

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        if self._recent is not None and self._prompt_ends is not None:
            self._recent[destination] = self._recent[source]
            self._prompt_ends[destination] = self._prompt_ends[source]

    def _admit_recent(self, admission: Admission) -> None:
        """Gives rows that share a prompt its last features. Their source may have generated since, and its ring have
        forgotten them: so those of each prompt are kept apart."""
        if self._recent is None:
            return
        rows, size = self.session.rows, self._recent.shape[1] - 1
        if self._prompt_ends is None:
            self._prompt_ends = self._recent.new_zeros(rows.capacity, self.context, self._recent.shape[-1])
        where = (rows.prompt_lengths[:, None] - 1 + self._behind_context()).clamp(min=0) % size  # [active, context]
        leaders = torch.arange(admission.first, admission.first + admission.leaders, device=where.device)
        self._prompt_ends[leaders] = self._recent[leaders[:, None], where[leaders]]
        if admission.followers:
            followers = torch.tensor(admission.followers, device=where.device)
            self._prompt_ends[followers] = self._prompt_ends[admission.sources]
            self._recent[followers[:, None], where[followers]] = self._prompt_ends[followers]

    def _behind_context(self) -> Tensor:
        """-context .. -1, `[context]`."""
        return torch.arange(-self.context, 0, device=self.session.rows.tokens.device)

    @property
    def cache_bytes(self) -> int:
        kept = (self._recent, self._prompt_ends)
        return self.cache.bytes + sum(tensor.nbytes for tensor in kept if tensor is not None)

    def _keep_recent(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        """Keeps the target's features `[B, q, F]` of a row's newest columns, for replays; in a ring:

        column    n-1-context .. n-2 | n-1 .. n-1+γ       of a row of n tokens: what a replay reads, and
                  context            | verified now       what the next one may read, of these
        """
        if not self.context:
            return
        rows, size = self.session.rows, self.context + 1 + MAX_DRAFT_LENGTH
        if self._recent is None:
            self._recent = features.new_zeros(rows.capacity, size + 1, features.shape[-1])
        first = rows.lengths[first_row : first_row + len(positions), None] - 1 - self.context  # [B, 1]
        is_near = (positions >= first) & (positions < first + size)  # [B, q]; others go to a slot nobody reads
        row = torch.arange(first_row, first_row + len(positions), device=positions.device)[:, None]  # [B, 1]
        self._recent[row, (positions % size).masked_fill(~is_near, size)] = features

    def _context_features(self) -> Tensor | None:
        if self._recent is None:
            return None
        rows, size = self.session.rows, self._recent.shape[1] - 1
        row = torch.arange(rows.active, device=rows.tokens.device)[:, None]  # [B, 1]
        return self._recent[row, rows.columns_behind(-1 - self.context, self.context).clamp(min=0) % size]

    def _over_target(self, logits: Tensor) -> Tensor:
        """`[B, n, V]` of logits over the draft vocabulary `[B, n, drafts]`; what it lacks is -inf."""
        if self.target_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self._vocabulary), -torch.inf)  # [B, n, V]
        return whole.index_copy_(-1, self.target_ids, logits)


def network_cost(network: nn.Module, head: nn.Module | None, rows: int = 1, tokens: int = 1) -> DraftCost:
    """Of one forward over `rows` positions that yields `tokens` draft tokens.

    Args:
        network: embeddings, looked up and not multiplied, do not count.
        head: the target's, where the network has none of its own.
    """
    tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    weights = [parameter for parameter in network.parameters() if id(parameter) not in tables]
    weights += list(head.parameters()) if head is not None else []
    size = sum(weight.numel() for weight in weights)
    return DraftCost(float(sum(weight.nbytes for weight in weights)), 2.0 * rows * size, tokens)
