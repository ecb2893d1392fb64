"""Computes a learned drafter's loss over whole sequences, against the target's logits and states.

Drafting could start at every position of a sequence, and the target's logits there are the label. The drafter runs as
in drafting, on the true tokens:

    EAGLE-3   each start i unrolls `depth` steps on its own output (training-time test, arXiv 2503.01840 §3.2):
              step k, start i    sees the real pairs 0..i and its own fed-back pairs, predicts token i + k + 1
    DFlash    random anchors a, a block after each (arXiv 2602.06036):
              draft d, anchor a  sees the target's features before a, predicts token a + d
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..generation.drafters.dflash.dflash_drafter import DFlashDrafter
from ..generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from ..generation.drafters.feature_drafter import FeatureDrafter
from ..generation.drafters.target_parts import changed, in_dtype_of, logit_changes, plain_embedding
from ..generation.engine.network.shadow import share_weights
from .whole_sequences import Unroll, block_states


_TINY = torch.finfo(torch.float32).tiny  # of a divisor: without positions a mean is 0, not NaN
LOGITS_ALIVE = 1 << 28
"""Most logits, of target and drafter, in memory at once. More are computed in pieces, and again in the backward
pass."""
_STARTS = 128  # most starts in one piece of the unroll: its work grows with their square


@dataclass(frozen=True)
class TargetView:
    """A target's view of whole sequences.

    Args:
        tokens: `[B, T]` int64, right-padded.
        is_real: `[B, T]` bool, False on padding.
        features: `[B, T, len(drafter.feature_layers) * H_t]`, the hidden states `drafter.feature_layers` side by side.
        hidden: `[B, T, H_t]`, the inputs of the target's output embedding.
        first: `[B]` int64, the first token whose prediction counts: a prompt's length, or 1 for all.
    """

    tokens: Tensor
    is_real: Tensor
    features: Tensor
    hidden: Tensor
    first: Tensor


class SequenceLoss(NamedTuple):
    """Sums over the counted positions, scalars, and their means; a mean over no position is 0.

    Args:
        entropies, weight: of the drafter's cross-entropies, by its position weights, and of these weights.
        distances, compared: of the distances between hidden states, and of their weights.
        agreed, positions: number of positions with equal likeliest tokens, and of all.
    """

    entropies: Tensor
    weight: Tensor
    distances: Tensor
    compared: Tensor
    agreed: Tensor
    positions: Tensor

    @property
    def cross_entropy(self) -> Tensor:
        """In nats, against the target's distribution at temperature 1, renormalised over the draft vocabulary."""
        return self.entropies / self.weight.clamp(min=_TINY)

    @property
    def regression(self) -> Tensor:
        """Smooth L1 between the drafter's hidden states and the target's at the same places."""
        return self.distances / self.compared.clamp(min=_TINY)

    @property
    def agreement(self) -> Tensor:
        """Share of the positions with equal likeliest tokens, without gradient."""
        return (self.agreed / self.positions.clamp(min=1)).detach()


def sequence_loss(
    drafter: Eagle3Drafter | DFlashDrafter,
    target: PreTrainedModel,
    view: TargetView,
    generator: torch.Generator | None = None,
    *,
    depth: int = 7,
    anchors: int | None = None,
    with_regression: bool = False,
) -> SequenceLoss:
    """The distance of a drafter from its target over whole sequences. Gradients reach only the drafter's network.

    A position counts if the predicted token is real and not before `view.first`, and the target's likeliest token is
    in the draft vocabulary. Weights are `drafter.position_weights`.

    Args:
        drafter: EAGLE-3 or DFlash.
        target: gives the embedding and the head.
        generator: draws DFlash's anchors; None: the global one of the CPU.
        depth: steps that EAGLE-3 is unrolled.
        anchors: number of DFlash's per sequence; None: enough to draft each token about twice.
        with_regression: whether to compute `regression` too (ER App. F.5), which is 0 otherwise: EAGLE-3's output at
            step 1, or DFlash's normed states, against `hidden` at the position before the predicted token.

    Raises:
        ValueError: `view` does not fit the drafter, compared states and `hidden` differ in width, a count is below 1,
            or the target's family does something unknown to its logits.
    """
    _check(drafter, view, depth, anchors, with_regression)
    of_target = _TargetLogits(TargetHead(target), view, drafter.target_ids)
    # In the dtype of drafting, whatever autocast the policy trains under.
    with torch.autocast(view.tokens.device.type, enabled=False):
        if isinstance(drafter, Eagle3Drafter):
            return _eagle3_loss(drafter, target, of_target, depth, with_regression)
        return _dflash_loss(drafter, target, of_target, anchors, generator, with_regression)


def _added(sums: Iterable[SequenceLoss]) -> SequenceLoss:
    return SequenceLoss(*(torch.stack(terms).sum() for terms in zip(*sums, strict=True)))


class _TargetLogits:
    """The target's outputs at any position, also after the end, where no position counts."""

    def __init__(self, head: "TargetHead", view: TargetView, target_ids: Tensor | None) -> None:
        self.head, self.view, self._target_ids = head, view, target_ids
        self.vocabulary = head.vocabulary
        self._rows = torch.arange(len(view.tokens), device=view.tokens.device)[:, None]  # [B, 1]

    def hidden(self, positions: Tensor) -> Tensor:
        """`[B, n, H_t]` at `positions`, `[n]` or `[B, n]`."""
        positions = positions.expand(len(self.view.tokens), -1).clamp(max=self.view.tokens.shape[1] - 1)  # [B, n]
        return self.view.hidden[self._rows, positions]

    def logits(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[B, n, drafts]` of the token after `positions`, and whether it counts, `[B, n]` bool."""
        view, width = self.view, self.view.tokens.shape[1]
        after = positions.expand(len(view.tokens), -1) + 1  # [B, n]
        counts = view.is_real[self._rows, after.clamp(max=width - 1)] & (after < width)  # [B, n]
        counts &= after >= view.first[:, None]
        logits = self.head(self.hidden(positions))  # [B, n, V]
        if self._target_ids is None:
            return logits, counts
        return logits[..., self._target_ids], counts & torch.isin(logits.argmax(dim=-1), self._target_ids)


def _compare(drafted: Tensor, wanted: Tensor, counts: Tensor, weights: Tensor) -> SequenceLoss:
    """Sums of the drafter's logits `[..., drafts]` against the target's, over positions `[...]` that count."""
    scores = F.log_softmax(drafted.to(torch.promote_types(drafted.dtype, torch.float32)), dim=-1)  # [..., drafts]
    entropies = -(wanted.softmax(dim=-1) * scores).sum(dim=-1)  # [...]
    weights = weights.to(entropies.dtype) * counts  # [...]
    none = entropies.new_zeros(())
    agreed = (drafted.argmax(dim=-1) == wanted.argmax(dim=-1)) & counts  # [...]
    return SequenceLoss((weights * entropies).sum(), weights.sum(), none, none, agreed.sum(), counts.sum())


def _regress(sums: SequenceLoss, states: Tensor, hidden: Tensor, weights: Tensor) -> SequenceLoss:
    """`sums` with smooth L1 of states `[..., H]` against the target's, by `weights` (`[...]`, 0 where none counts)."""
    wide = torch.promote_types(states.dtype, torch.float32)
    distances = F.smooth_l1_loss(states.to(wide), hidden.to(wide), reduction="none").mean(dim=-1)  # [...]
    weights = weights.to(distances.dtype)
    return sums._replace(distances=(weights * distances).sum(), compared=weights.sum())


def _total(piece: Callable[[slice], SequenceLoss], pieces: list[slice], recompute: bool) -> SequenceLoss:
    if recompute:
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return _added(again(partial(piece, some)) for some in pieces)
    return _added(map(piece, pieces))


def _eagle3_loss(
    drafter: Eagle3Drafter, target: PreTrainedModel, of_target: _TargetLogits, depth: int, with_regression: bool
) -> SequenceLoss:
    view, network = of_target.view, drafter.network
    batch, pairs = view.tokens.shape[0], view.tokens.shape[1] - 1
    embedded = network.embed(view.tokens[:, 1:], plain_embedding(target))  # [B, N, H]
    weights = embedded.new_tensor(drafter.position_weights(depth), dtype=torch.float64)  # [depth]
    unroll = Unroll(network, embedded, network.project(view.features[:, :-1].to(network.dtype)))
    per_start = batch * (depth + 1) * of_target.vocabulary
    width = min(max(LOGITS_ALIVE // per_start, 16), _STARTS)

    def piece(starts: slice) -> SequenceLoss:
        count = starts.stop - starts.start  # n
        positions = torch.arange(starts.start + 1, starts.stop + depth, device=embedded.device)  # [n + depth - 1]
        logits, counts = of_target.logits(positions)  # [B, n + depth - 1, drafts], [B, n + depth - 1]
        steps = unroll.outputs(starts, depth)  # of [B, n, H]
        at = [slice(step, step + count) for step in range(depth)]
        sums = _added(
            _compare(network.logits(h, of_target.head.scores), logits[:, where], counts[:, where], weight)
            for h, where, weight in zip(steps, at, weights, strict=True)
        )
        if with_regression:
            sums = _regress(sums, steps[0], of_target.hidden(positions[:count]), counts[:, :count])
        return sums

    starts = [slice(start, min(start + width, pairs)) for start in range(0, pairs, width)]
    return _total(piece, starts, recompute=per_start * pairs > LOGITS_ALIVE)


def _dflash_loss(
    drafter: DFlashDrafter,
    target: PreTrainedModel,
    of_target: _TargetLogits,
    anchors: int | None,
    generator: torch.Generator | None,
    with_regression: bool,
) -> SequenceLoss:
    view, network, config = of_target.view, drafter.network, drafter.config
    batch, width = view.tokens.shape
    wanted = anchors if anchors is not None else -(-2 * width // config.drafts)
    chosen, is_chosen = draw_anchors(view, min(wanted, width - 1), generator)  # [B, M]
    drafts = torch.arange(config.drafts, device=chosen.device)  # [drafts]
    weights = view.hidden.new_tensor(drafter.position_weights(config.drafts), dtype=torch.float64)  # [drafts]
    size = min(max(LOGITS_ALIVE // (batch * 2 * config.drafts * of_target.vocabulary), 1), chosen.shape[1])

    def piece(some: slice) -> SequenceLoss:
        states = block_states(network, target, view.tokens, view.features, chosen[:, some])  # [B, m, n, H]
        states = states[:, :, config.block_size - config.drafts :].flatten(1, 2)  # [B, m * drafts, H]
        positions = (chosen[:, some, None] + drafts).flatten(1)  # [B, m * drafts]: before the drafted tokens
        logits, counts = of_target.logits(positions)
        counts &= is_chosen[:, some].repeat_interleave(config.drafts, dim=1)
        weight = weights.repeat(positions.shape[1] // config.drafts).expand_as(counts)  # [B, m * drafts]
        sums = _compare(network.logits(states, of_target.head.scores), logits, counts, weight)
        if with_regression:
            sums = _regress(sums, states, of_target.hidden(positions), weight * counts)
        return sums

    pieces = [slice(start, start + size) for start in range(0, chosen.shape[1], size)]
    return _total(piece, pieces, recompute=len(pieces) > 1)


def draw_anchors(view: TargetView, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draws up to `count` different positions of each sequence with a counted token after them: `[B, count]` int64,
    and `[B, count]` bool: drawn ones, since a sequence may have fewer."""
    where = torch.device("cpu") if generator is None else generator.device
    after = torch.arange(1, view.tokens.shape[1], device=view.tokens.device)  # [T - 1]
    eligible = view.is_real[:, 1:] & (after >= view.first[:, None])  # [B, T - 1]
    order = torch.rand(eligible.shape, generator=generator, device=where).to(eligible.device)  # [B, T - 1]
    drawn = order.masked_fill(~eligible, -1.0).topk(count, dim=1)
    return drawn.indices, drawn.values >= 0


def _check(drafter: FeatureDrafter, view: TargetView, depth: int, anchors: int | None, with_regression: bool) -> None:
    if not isinstance(drafter, Eagle3Drafter | DFlashDrafter):
        raise ValueError(f"a {type(drafter).__name__} has no loss over sequences; EAGLE-3 and DFlash drafters do.")
    if depth < 1:
        raise ValueError(f"depth={depth}; EAGLE-3 must be unrolled at least 1 step.")
    if anchors is not None and anchors < 1:
        raise ValueError(f"anchors={anchors}; give at least 1 per sequence, or None.")
    (batch, length), wide = view.tokens.shape, view.hidden.shape[-1]
    expected = {
        "is_real": (batch, length),
        "features": (batch, length, len(drafter.feature_layers) * wide),
        "hidden": (batch, length, wide),
        "first": (batch,),
    }
    for name, shape in expected.items():
        if (size := tuple(vars(view)[name].shape)) != shape:
            raise ValueError(
                f"view.{name} has shape {list(size)} and must have {list(shape)}: tokens are {batch} x {length}, the "
                f"drafter reads the hidden states {list(drafter.feature_layers)}, which are {wide} wide."
            )
    if length < 2:
        raise ValueError(f"view.tokens has shape {[batch, length]}; sequences of at least 2 tokens are needed.")
    if with_regression and drafter.width != wide:
        raise ValueError(
            f"with_regression=True: the drafter's states are {drafter.width} wide and the target's {wide}; they "
            "cannot be compared. Train such a drafter on the cross-entropy alone."
        )


class FrozenHead(nn.Module):
    """A target's output embedding on its live weights and in eval mode. Gradients pass through it, not into its
    weights, which are no parameters of this module."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        # In a tuple: a submodule would register its parameters. In eval mode: the dropout of an adapter would draw
        # from the random numbers of the policy's training.
        self._held = (share_weights(head),)

    def forward(self, states: Tensor) -> Tensor:
        """Scores `[..., V]` of `[..., H_t]`, in the head's dtype."""
        (head,) = self._held
        # Other weights need no detaching, and quantized ones would lose their scales.
        parameters = {name: weight.detach() for name, weight in head.named_parameters() if weight.requires_grad}
        scores: Tensor = functional_call(head, parameters, (in_dtype_of(head, states),))
        return scores


class TargetHead:
    """The target's logits: its head (`scores`), then a `factor`, then a `softcap`, if any.

    Raises:
        ValueError: its config has an unknown key about logits, or it has no head.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        head = target.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(target).__name__} has no output embedding; a causal language model is needed.")
        self.scores = FrozenHead(head)
        self.factor, self.softcap = logit_changes(target)
        self.vocabulary: int = target.config.get_text_config(decoder=True).vocab_size

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]`, at least float32, of last hidden states `[..., H_t]`, without gradients."""
        with torch.no_grad():
            logits = self.scores(hidden)  # [..., V]
            return changed(logits.to(torch.promote_types(logits.dtype, torch.float32)), self.factor, self.softcap)
