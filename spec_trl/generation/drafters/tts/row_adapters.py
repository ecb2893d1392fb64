"""Low-rank corrections of a drafter's layers, one set per cache row or one for all, and the Adam that trains them.

With a correction of its own each request of a batch learns for itself and starts anew (TTS resets between requests),
over weights that all rows share. And a drafter whose weights are packed, and so cannot change, can still learn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....quantization.linear import QuantizedLinear
from ....quantization.source_weight import read_projection


_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # torch.optim.Adam's


class RowTensors:
    """Tensors with one entry per cache row, in their first dimension, written in place."""

    def __init__(self, by_row: Sequence[Tensor]) -> None:
        self._by_row = by_row

    def reset(self, rows: Sequence[int]) -> None:
        """Sets the entries of `rows` to 0."""
        for tensor in self._by_row:
            tensor[list(rows)] = 0

    def move(self, source: list[int], destination: list[int]) -> None:
        """Copies the entries of rows `source` to rows `destination`."""
        for tensor in self._by_row:
            tensor[destination] = tensor[source]

    @property
    def bytes(self) -> int:
        """Bytes that they take."""
        return sum(tensor.nbytes for tensor in self._by_row)


class RowAdapters(RowTensors):
    """y_b + (x_b @ downᵀ) @ up_bᵀ for row b of every adapted layer. `up` starts at 0: at first nothing changes.

    Only `up` learns (LoRA-FA, arXiv 2308.03303), so rows share `down`, a random projection. `down` has the scale of
    the layer's own weight: then a change of η in `up` changes y by a share of about η, whatever the layer's scale.

    Args:
        layers: linear layers by name, with inputs `[B, q, in]`.
        rows: number of cache rows with a correction of their own; 1: one correction for all.
        rank: r.

    Attributes:
        down: `[r, in]` for each layer, by name; at least float32.
        up: `[rows, out, r]` for each layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module], rows: int, rank: int) -> None:
        self.rows = rows
        generator = torch.Generator().manual_seed(0)
        self.down: dict[str, Tensor] = {}
        self.up: dict[str, Tensor] = {}
        for name, layer in layers.items():
            # Of a quantized layer, what it was made of.
            weight, _ = read_projection(layer.dense if isinstance(layer, QuantizedLinear) else layer)  # [out, in]
            wide = torch.promote_types(weight.dtype, torch.float32)
            scale = weight.detach().to(wide).square().mean().sqrt()
            down = torch.randn(rank, weight.shape[1], generator=generator, dtype=torch.float64)
            self.down[name] = down.to(device=weight.device, dtype=wide) * scale
            self.up[name] = torch.zeros(rows, len(weight), rank, dtype=wide, device=weight.device)
        super().__init__(self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """`up` of all layers, always in the same order."""
        return list(self.up.values())

    @property
    def bytes(self) -> int:
        return super().bytes + sum(down.nbytes for down in self.down.values())

    def attach(self, layers: Mapping[str, nn.Module], first_row: Callable[[], int]) -> list[RemovableHandle]:
        """Has every forward of `layers`, of the same names and shapes, corrected until the handles are removed;
        `first_row` returns the first cache row of the forward under way, which raises ValueError where rows learn
        separately and a layer's inputs have no batch dimension."""

        # Each hook holds its own tensors: one that looks them up by name would be compiled for each layer anew.
        def correction(name: str, down: Tensor, up: Tensor) -> Callable[..., Tensor]:
            def correct(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
                x = args[0].to(down.dtype)  # [B, q, in]
                own = up[0]  # [out, r]
                if self.rows > 1:
                    if x.dim() != 3:
                        raise ValueError(
                            f"the inputs of layer {name!r} have no batch dimension (shape {list(x.shape)}): rows "
                            'cannot learn separately; use tts_scope="rollout" or "run", or one row at a time '
                            "(max_batch_size=1)"
                        )
                    first = first_row()
                    own = up[first : first + len(x)]  # [B, out, r]
                return output + (x @ down.mT @ own.mT).to(output.dtype)  # [B, q, out]

            return correct

        return [
            layer.register_forward_hook(correction(name, self.down[name], self.up[name]))
            for name, layer in layers.items()
        ]


class RowAdam(RowTensors):
    """Adam with a step count per row: torch has one per tensor, and rows start anew at different times. `tensors`,
    with rows in the first dimension, are written in place."""

    def __init__(self, tensors: list[Tensor], learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._tensors = tensors
        self._means = [torch.zeros_like(tensor) for tensor in tensors]
        self._squares = [torch.zeros_like(tensor) for tensor in tensors]
        self._steps = torch.zeros(len(tensors[0]), 1, 1, dtype=torch.float64, device=tensors[0].device)  # [rows, 1, 1]
        super().__init__([*self._means, *self._squares, self._steps])

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learns: Tensor) -> None:
        """One step by the gradients of each tensor for those of the first rows that learn, by `[n <= rows]` bool; the
        others keep their moments."""
        (which,) = learns.nonzero(as_tuple=True)  # [m]
        self._steps[which] += 1
        counts = self._steps[which]  # [m, 1, 1]
        beta1, beta2 = _BETAS
        for tensor, mean, square, gradient in zip(self._tensors, self._means, self._squares, gradients, strict=True):
            found = gradient[which]  # [m, ...]
            mean[which] = new_mean = mean[which].lerp(found, 1 - beta1)
            square[which] = new_square = square[which].lerp(found.square(), 1 - beta2)
            denominator = (new_square / (1 - beta2**counts)).sqrt().to(tensor.dtype) + _EPSILON
            tensor[which] -= self.learning_rate * (new_mean / (1 - beta1**counts)).to(tensor.dtype) / denominator

    def state_dict(self) -> dict[str, Any]:
        """Moments and counts, for a checkpoint."""
        return {"means": self._means, "squares": self._squares, "steps": self._steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave for tensors of the same shapes."""
        saved = [*state["means"], *state["squares"], state["steps"]]
        for own, value in zip(self._by_row, saved, strict=True):
            own.copy_(value)
