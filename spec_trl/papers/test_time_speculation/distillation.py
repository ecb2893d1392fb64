"""Computes the loss of Test-Time Speculation (TTS §4.1), and τ predicted from logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...generation.engine.sampling.noise import widen


@torch.no_grad()
def expected_tokens(drafts: Tensor, target: Tensor, target_ids: Tensor | None) -> Tensor:
    """Expected tokens of a round by row `[B]`, at temperature 1, where a draft is accepted with the overlap of p and
    q: 1 + Σ_k Π_{j≤k} Σ_v min(p_j, q_j). Arguments as of :func:`distillation_loss`."""
    p = target[:, : drafts.shape[1]].float().softmax(-1)  # [B, C, V]
    if target_ids is not None:
        p = p[..., target_ids]  # [B, C, draft V]
    overlap = torch.minimum(p, drafts.float().softmax(-1)).sum(-1)  # [B, C]
    return 1 + overlap.cumprod(1).sum(1)


def distillation_loss(drafts: Tensor, target: Tensor, target_ids: Tensor | None, weights: Sequence[float]) -> Tensor:
    """Σ_k w_k KL(p_k ‖ q_k) by row `[B]`, in nats, at temperature 1 (TTS §4.1).

    Over a pruned vocabulary p is renormalised, and positions whose likeliest token is outside of it have no loss, as
    in EAGLE-3's training.

    Args:
        drafts: `[B, C, draft vocabulary]` raw logits of q, with gradient.
        target: `[B, >= C, V]` raw logits of p.
        target_ids: `[draft vocabulary]` int64, the target's token for each of the drafter's; None: the same.
        weights: w_k, C of them.
    """
    scores = widen(target[:, : drafts.shape[1]])  # [B, C, V]
    is_known = torch.ones_like(scores[..., 0], dtype=torch.bool)  # [B, C]
    if target_ids is not None:
        is_known = torch.isin(scores.argmax(-1), target_ids)  # [B, C]
        scores = scores[..., target_ids]  # [B, C, draft V]
    log_p, log_q = scores.log_softmax(-1), widen(drafts).log_softmax(-1)  # [B, C, draft V] each
    terms = log_p.exp() * (log_p - log_q)  # [B, C, draft V]
    losses = terms.where(log_p > -torch.inf, 0).sum(-1).where(is_known, 0)  # [B, C]; a ruled-out token: 0 log 0
    return losses @ torch.tensor(weights, dtype=losses.dtype, device=losses.device)  # [B]
