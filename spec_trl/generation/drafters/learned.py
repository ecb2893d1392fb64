"""What drafters that were trained on a target's hidden states have in common."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .base import DraftCost, Drafter


class LearnedDrafter(Drafter):
    """Drafts from the hidden states that the target's runner tells (`EagerRunner.listen`).

    Attributes:
        position_limit: tokens that its scaled positions reach; None: RoPE without scaling goes on.
        target_ids: `[draft vocabulary]` int64, the target's token for each of the drafter's; None: they are the same.
    """

    has_probabilities = True
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
