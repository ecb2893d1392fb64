"""Quantizes the drafter by activations (AWQ, Lin et al. 2024; ER §C.4).

Rounding errors of weights count more where the input channel is large. AWQ multiplies the weights of channel c by s_c
and the input by 1/s_c, so that rounding hurts large channels less: s = a^alpha with a = mean |x| per channel and alpha
from a small grid, chosen per layer. Differences from the AWQ paper:

- 1/s multiplies the layer's input. AWQ folds it into the norm before the layer; here the norm belongs to the policy.
- The search minimizes sum_c E[x_c²] ‖Q_c - W_c‖², the diagonal of the output error E‖(Q - W) x‖²: it neglects
  correlations between channels and needs no stored activations.
- alpha is searched on some rows of the weight, for all of them. AWQ's clipping of weights is left out.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .kernels import PackedWeight
from .rtn import RoundToNearest, computing_dtype
from .source_weight import modules_by_name


ALPHAS = tuple(i / 10 for i in range(11))  # 0 first: round-to-nearest wins ties
SEARCH_ROWS = 128  # rows of a weight in the search
LARGEST_SPREAD = 1e4  # largest factor between a channel and the mean
OBSERVED_ROWS = 256  # observed rows of a forward


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of a projection's input, per channel: E|x| and E[x²], float32 [in]."""

    mean_magnitude: Tensor
    mean_square: Tensor


class ActivationStatistics:
    """Statistics of the inputs of a policy's projections, from forwards that happen anyway.

    Inside `collect`, hooks on the policy's modules observe up to 256 rows of a forward, padding included, without
    waiting for the device. Ranks under data parallelism observe different rows: drafters may differ, outputs cannot.

    Args:
        policy: the live policy, without peft's outer wrapper: the model that its drafter was made of.
        names: projections to watch, as :attr:`QuantizedNetwork.activation_aware_layers` lists them.

    Raises:
        ValueError: the policy has no module of such a name.
    """

    def __init__(self, policy: nn.Module, names: Iterable[str]) -> None:
        modules, names = modules_by_name(policy), list(names)
        if unknown := [name for name in names if name not in modules]:
            raise ValueError(
                f"names: the policy has no module {unknown[0]!r}; pass the activation_aware_layers of a drafter of "
                "this very policy, and the policy without peft's outer wrapper."
            )
        self._names = {modules[name]: name for name in names}
        self._sums: dict[str, Tensor] = {}  # [2, in]: of |x| and of x²
        self._rows: dict[str, int] = {}
        self._step: int | None = None

    @contextmanager
    def collect(self, step: int) -> Iterator[None]:
        """Observes the forwards inside the block: those of one `step` add up, a new step replaces the older one. Leave
        the block before generating: a hooked lm_head is not packed."""
        if step != self._step:
            self._step = step
            self._rows = {}
            for sums in self._sums.values():
                sums.zero_()
        handles = [module.register_forward_pre_hook(self._observe) for module in self._names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def of(self, name: str) -> ChannelStatistics | None:
        """Statistics of the newest step, or None if the projection called `name` did not run in it."""
        rows = self._rows.get(name)
        return ChannelStatistics(*(self._sums[name] / rows)) if rows else None  # of [2, in]

    def _observe(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        name = self._names.get(module)
        if name is None or not inputs:  # a shadow made inside the block
            return
        with torch.inference_mode(False), torch.no_grad():  # sums made in inference mode could not be added to outside
            x = inputs[0]
            rows = x.reshape(-1, x.shape[-1])  # [n, in]
            # An odd stride: an even one would sample the same few positions of every sequence of a batch.
            rows = rows[:: -(-len(rows) // OBSERVED_ROWS) | 1]  # [m, in]
            magnitudes = rows.abs().to(torch.float32)  # [m, in]
            sums = self._sums.get(name)
            if sums is None or sums.device != x.device:
                sums = self._sums[name] = torch.zeros(2, x.shape[-1], device=x.device)  # [2, in]
            sums[0] += magnitudes.sum(0)  # [in]
            sums[1] += magnitudes.square_().sum(0)  # [in]
            self._rows[name] = self._rows.get(name, 0) + len(rows)


class ActivationAware(RoundToNearest):
    """Round-to-nearest after a scaling of the input channels."""

    def quantize_scaled_(
        self, weight: Tensor, packed: PackedWeight, inverse_scales: Tensor, activations: ChannelStatistics | None
    ) -> None:
        """Writes the scaled `weight` [out, in] into `packed`, 4-bit, and the input factors 1/s into `inverse_scales`
        [in], in place; without `activations` of this layer all factors are 1 (round to nearest)."""
        scales = None if activations is None else self._search(weight, packed, activations)  # [in]
        inverse_scales.copy_(inverse_scales.new_ones(()) if scales is None else scales.reciprocal())  # [in]
        self.quantize_(weight, packed, scales)

    def _search(self, weight: Tensor, packed: PackedWeight, activations: ChannelStatistics) -> Tensor:
        """The best s, [in], in the dtype to compute in. The choice stays on the device."""
        candidates, importance = candidate_scales(activations)  # [alphas, in], [in]
        dtype = computing_dtype(weight.dtype)
        candidates, importance = candidates.to(weight.device, dtype), importance.to(weight.device, dtype)
        sample = weight[:: -(-len(weight) // SEARCH_ROWS)]  # [rows, in]
        errors = torch.stack([self._error(sample, packed, scales, importance) for scales in candidates])  # [alphas]
        return candidates.index_select(0, errors.argmin(0, keepdim=True))[0]  # [in]

    def _error(self, sample: Tensor, packed: PackedWeight, scales: Tensor, importance: Tensor) -> Tensor:
        """sum_c importance_c ‖Q_c / s_c - W_c‖² over the rows of `sample` [rows, in] → []."""
        rounded = self._round(sample, packed, scales)
        values = self._borrow(scales.dtype, sample).copy_(rounded.codes)  # [rows, in]
        grouped = values.view(len(sample), -1, packed.layer.group)  # [rows, groups, group]
        grouped.sub_(rounded.zeros[..., None]).mul_(rounded.scales[..., None])  # [rows, groups, group]
        return values.div_(scales).sub_(sample).square_().sum(0) @ importance  # []


def candidate_scales(activations: ChannelStatistics) -> tuple[Tensor, Tensor]:
    """s = a^alpha for each alpha, centred in the log so that max(s) · min(s) = 1, float32 [alphas, in], and the
    channels' importance, float32 [in]. Channels with only zeros, NaN or infinity get an average scale and no
    importance."""
    magnitude, square = activations.mean_magnitude, activations.mean_square  # [in], [in]
    usable = torch.isfinite(magnitude) & torch.isfinite(square) & (magnitude > 0)  # [in]
    known = magnitude.where(usable, 0)  # [in]
    mean = known.sum() / usable.sum().clamp(min=1)  # []
    relative = (known / mean).clamp(1 / LARGEST_SPREAD, LARGEST_SPREAD).where(usable, 1)  # [in]
    logs = relative.log()  # [in]
    logs = logs - (logs.amax() + logs.amin()) / 2  # [in]
    alphas = torch.tensor(ALPHAS, dtype=logs.dtype, device=logs.device)  # [alphas]
    return torch.exp(alphas[:, None] * logs), square.where(usable, 0)  # [alphas, in], [in]
