"""Low-rank corrections of a drafter's layers, one set per cache row or one for all, and the Adam that trains them.

A row's own correction lets each request of a batch learn for itself and start anew (TTS resets between requests), on
weights that all rows share; and it lets a drafter learn whose weights are packed and cannot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....quantization.linear import QuantizedLinear
from ....quantization.source_weight import read_projection


_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # torch.optim.Adam's


class RowAdapters:
    """y_b + (x_b @ downᵀ) @ up_bᵀ for row b of every adapted layer. `up` starts at 0: at first nothing changes.

    Only `up` learns (LoRA-FA, arXiv 2308.03303): rows then share `down`, a random projection. It has the scale of the
    layer's own weight, so that a change of η in `up` changes y by a share of about η, whatever the layer's scale.

    Args:
        layers: linear layers by name, fed with `[B, q, in]`.
        rows: corrections of their own; 1: one for all cache rows.
        rank: r.
        seed: of `down`.

    Attributes:
        down: `[r, in]` for each layer, by name; at least float32.
        up: `[rows, out, r]` for each layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], rows: int, rank: int, seed: int = 0) -> None:
        self.rows = rows
        generator = torch.Generator().manual_seed(seed)
        self.down: dict[str, Tensor] = {}
        self.up: dict[str, Tensor] = {}
        for name, layer in layers.items():
            weight = _weight(layer)  # [out, in]
            wide = torch.promote_types(weight.dtype, torch.float32)
            scale = weight.to(wide).square().mean().sqrt()
            down = torch.randn(rank, weight.shape[1], generator=generator, dtype=torch.float64)
            self.down[name] = down.to(device=weight.device, dtype=wide) * scale
            self.up[name] = torch.zeros(rows, len(weight), rank, dtype=wide, device=weight.device)

    @property
    def tensors(self) -> list[Tensor]:
        """`up` of all layers, always in the same order."""
        return list(self.up.values())

    @property
    def bytes(self) -> int:
        """Bytes that they take."""
        return sum(tensor.nbytes for tensor in [*self.down.values(), *self.up.values()])

    def attach(self, layers: Mapping[str, nn.Module], first_row: Callable[[], int]) -> list[RemovableHandle]:
        """Has `layers`, of the same names and shapes, corrected in every forward until the handles are removed.

        Args:
            layers: of the network that drafts, or of a copy that learns.
            first_row: the cache row of the first row that the forward under way runs.
        """
        return [layer.register_forward_hook(self._corrects(name, first_row)) for name, layer in layers.items()]

    def reset(self, rows: Sequence[int]) -> None:
        """Takes the corrections of `rows` back."""
        for up in self.tensors:
            up[list(rows)] = 0

    def move(self, source: list[int], destination: list[int]) -> None:
        """Rows `source` are now rows `destination`."""
        for up in self.tensors:
            up[destination] = up[source]

    def copy_from(self, other: "RowAdapters") -> None:
        """Takes over what `other` learned, in place: captured forwards read it where it is."""
        torch._foreach_copy_(self.tensors, other.tensors)

    def _corrects(self, name: str, first_row: Callable[[], int]) -> Callable[..., Tensor]:
        down, up = self.down[name], self.up[name]

        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            x = args[0].to(down.dtype)  # [B, q, in]
            own = up[0]  # [out, r]
            if self.rows > 1:
                if x.dim() != 3:
                    raise ValueError(
                        f"layer {name!r} is fed with inputs of shape {list(x.shape)} that say no row, so rows cannot "
                        'learn apart; use tts_scope="rollout" or "run", or one row at a time (max_batch_size=1)'
                    )
                first = first_row()
                own = up[first : first + len(x)]  # [B, out, r]
            return output + (x @ down.mT @ own.mT).to(output.dtype)  # [B, q, out]

        return hook


class RowAdam:
    """Adam with a step count per row: torch's counts per tensor, and rows start anew at different times.

    Args:
        tensors: of a leading dimension of rows; written in place.
        learning_rate: η.
    """

    def __init__(self, tensors: list[Tensor], learning_rate: float) -> None:
        self._tensors, self._learning_rate = tensors, learning_rate
        self._means = [torch.zeros_like(tensor) for tensor in tensors]
        self._squares = [torch.zeros_like(tensor) for tensor in tensors]
        self._steps = torch.zeros(len(tensors[0]), 1, 1, dtype=torch.float64, device=tensors[0].device)  # [rows, 1, 1]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learns: Tensor) -> None:
        """One step by the `gradients` of each tensor, of those of the first rows that learn (`[n <= rows]` bool); the
        others keep their moments too."""
        (which,) = learns.nonzero(as_tuple=True)  # [m]
        self._steps[which] += 1
        counts = self._steps[which]  # [m, 1, 1]
        beta1, beta2 = _BETAS
        for tensor, mean, square, gradient in zip(self._tensors, self._means, self._squares, gradients, strict=True):
            found = gradient[which]  # [m, ...]
            mean[which] = new_mean = mean[which].lerp(found, 1 - beta1)
            square[which] = new_square = square[which].lerp(found.square(), 1 - beta2)
            denominator = (new_square / (1 - beta2**counts)).sqrt().to(tensor.dtype) + _EPSILON
            tensor[which] -= self._learning_rate * (new_mean / (1 - beta1**counts)).to(tensor.dtype) / denominator

    def reset(self, rows: Sequence[int]) -> None:
        """Forgets what `rows` have learned."""
        where = list(rows)
        for tensor in (*self._means, *self._squares, self._steps):
            tensor[where] = 0

    def move(self, source: list[int], destination: list[int]) -> None:
        """Rows `source` are now rows `destination`."""
        for tensor in (*self._means, *self._squares, self._steps):
            tensor[destination] = tensor[source]

    def state_dict(self) -> dict[str, Any]:
        """Moments and counts, for a checkpoint."""
        return {"means": self._means, "squares": self._squares, "steps": self._steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, of tensors of the same shapes."""
        for own, saved in zip((self._means, self._squares), (state["means"], state["squares"]), strict=True):
            for moment, value in zip(own, saved, strict=True):
                moment.copy_(value)
        self._steps.copy_(state["steps"])

    @property
    def bytes(self) -> int:
        """Bytes of its moments."""
        return sum(tensor.nbytes for tensor in (*self._means, *self._squares))


def _weight(layer: nn.Module) -> Tensor:
    """`[out, in]` of a linear layer; of a quantized one, what it was made of."""
    weight, _ = read_projection(layer.dense if isinstance(layer, QuantizedLinear) else layer)
    return weight.detach()
