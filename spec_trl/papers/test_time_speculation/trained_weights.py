"""Holds the weights that Test-Time Speculation trains: a drafter's own, or low-rank corrections.

A learner trains a copy of the drafting network, at least in float32, while the network drafts. `publish` then copies
the result into the drafting network, in place. A correction belongs to one cache row, so that every request trains
and resets a separate one (TTS resets between requests), or to all rows. Packed weights allow corrections only.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...generation.drafters.trainable_drafter import TrainableDrafter
from ...generation.engine.network.shadow import share_weights
from ...quantization.linear import PackedLayer, QuantizedLinear
from ...quantization.source_weight import read_projection


CORRECTION_RATE = 3e-4
"""η of low-rank corrections, relative to the layer's scale."""
_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # torch.optim.Adam's


class Learner(ABC):
    """Trains a copy of a drafter.

    Attributes:
        network: the trained copy of the drafting network.
        initial: a network with the weights before learning, q_0; None: not needed.
        tensors: the trained tensors, with gradient.
        published: tensors of the drafting network, written in place since captured forwards read them.
        rows: number of separate adapters, one per cache row; 1: all rows share the tensors.
        learning_rate: η of Adam.
    """

    network: nn.Module
    initial: nn.Module | None
    tensors: list[Tensor]
    published: list[Tensor]
    rows: int
    learning_rate: float

    @abstractmethod
    def step(self, gradients: Sequence[Tensor | None], drafted: Tensor) -> None:
        """A step of Adam by the `gradients` of `tensors`, from the first rows `drafted` (`[B]` bool)."""

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the tensors into the drafting network."""
        torch._foreach_copy_(self.published, self.tensors)

    @abstractmethod
    def reset(self, rows: Iterable[int]) -> None:
        """Resets the tensors of cache rows `rows`, and Adam's moments."""

    @abstractmethod
    def move(self, source: list[int], destination: list[int]) -> None:
        """Moves the tensors of cache rows `source` to rows `destination`."""

    @abstractmethod
    def release(self) -> None:
        """Restores the drafting network."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and moments for a checkpoint, not copied."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads and publishes the result of :meth:`state_dict`. Raises ValueError, and changes nothing, for
        tensors of other shapes."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of learning in addition to the drafting network, gradients included."""


class WeightLearner(Learner):
    """Trains all weights that a drafter does not share with the target (TTS §4.1), for all rows together."""

    rows = 1

    def __init__(self, drafter: TrainableDrafter, learning_rate: float, keeps_initial: bool) -> None:
        drafting = drafter.trained(drafter.network)
        # A step of Adam is far below the spacing of bfloat16 numbers: there it would be rounded away.
        wide = torch.promote_types(drafting[0].dtype, torch.float32)
        self.network = copy.deepcopy(drafter.network).to(wide).requires_grad_(False)
        self.tensors = [parameter.requires_grad_() for parameter in drafter.trained(self.network)]
        self.initial = copy.deepcopy(self.network).requires_grad_(False) if keeps_initial else None
        self.learning_rate = learning_rate
        self.published = [parameter.data for parameter in drafting]
        self._first = [tensor.clone() for tensor in self.published]
        self._start_adam()

    def _start_adam(self) -> None:
        self._optimizer = torch.optim.Adam(self.tensors, self.learning_rate, fused=True)

    def step(self, gradients: Sequence[Tensor | None], drafted: Tensor) -> None:
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def reset(self, rows: Iterable[int]) -> None:
        self.release()
        torch._foreach_copy_(self.tensors, self._first)
        self._start_adam()

    def move(self, source: list[int], destination: list[int]) -> None:
        """Does nothing: all rows share the tensors."""

    @torch.no_grad()
    def release(self) -> None:
        torch._foreach_copy_(self.published, self._first)

    def state_dict(self) -> dict[str, Any]:
        tensors = [tensor.detach() for tensor in self.tensors]
        return {"tensors": tensors, "moments": self._optimizer.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        moments = copy.deepcopy(state["moments"])  # torch would write into the caller's tensors
        _copy_tensors(state["tensors"], self.tensors)
        groups = self._optimizer.state_dict()["param_groups"]  # the learning rate is this run's
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.publish()

    @property
    def bytes(self) -> int:
        copies = [network for network in (self.network, self.initial) if network is not None]
        held = [*(p for network in copies for p in network.parameters()), *self._first]
        return sum(tensor.nbytes for tensor in [*held, *3 * self.tensors])  # gradients and two moments


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
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self._by_row)


class RowAdapters(RowTensors):
    """y_b + (x_b @ downᵀ) @ up_bᵀ for row b of every adapted layer. `up` starts at 0: at first nothing changes.

    Only `up` is trained (LoRA-FA, arXiv 2308.03303), so rows share `down`, a random projection. `down` has the scale
    of the layer's weight: then a change of η in `up` changes y by a share of about η, whatever the layer's scale.

    Args:
        layers: linear layers by name, with inputs `[B, q, in]`.
        rows: number of cache rows, with a correction per row; 1: one correction for all rows.
        rank: r.

    Attributes:
        down: `[r, in]` by layer name; at least float32.
        up: `[rows, out, r]` by layer name.
    """

    def __init__(self, layers: Mapping[str, nn.Module], rows: int, rank: int) -> None:
        self.rows = rows
        generator = torch.Generator().manual_seed(0)
        self.down: dict[str, Tensor] = {}
        self.up: dict[str, Tensor] = {}
        for name, layer in layers.items():
            # A quantized layer holds the layer that it was packed from.
            weight, _ = read_projection(layer.dense if isinstance(layer, QuantizedLinear) else layer)  # [out, in]
            wide = torch.promote_types(weight.dtype, torch.float32)
            scale = weight.detach().to(wide).square().mean().sqrt()
            down = torch.randn(rank, weight.shape[1], generator=generator, dtype=torch.float64)
            self.down[name] = down.to(device=weight.device, dtype=wide) * scale
            self.up[name] = torch.zeros(rows, len(weight), rank, dtype=wide, device=weight.device)
        super().__init__(self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.up.values())

    @property
    def bytes(self) -> int:
        return super().bytes + sum(down.nbytes for down in self.down.values())

    def attach(self, layers: Mapping[str, nn.Module], first_row: Callable[[], int]) -> list[RemovableHandle]:
        """Corrects every forward of `layers`, of the same names and shapes, until the handles are removed;
        `first_row` returns the first cache row of the running forward, and raises ValueError where rows learn
        separately and a layer's inputs have no batch dimension."""

        # A hook holds its tensors: one that looks them up by name would be compiled again for every layer.
        def correction(name: str, down: Tensor, up: Tensor) -> Callable[..., Tensor]:
            def correct(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
                x = args[0].to(down.dtype)  # [B, q, in]
                up_of_row = up[0]  # [out, r]
                if self.rows > 1:
                    if x.dim() != 3:
                        raise ValueError(
                            f"the inputs of layer {name!r} have no batch dimension (shape {list(x.shape)}): rows "
                            'cannot learn separately; use tts.scope="rollout" or "run", or one row at a time '
                            "(max_batch_size=1)"
                        )
                    first = first_row()
                    up_of_row = up[first : first + len(x)]  # [B, out, r]
                return output + (x @ down.mT @ up_of_row.mT).to(output.dtype)  # [B, q, out]

            return correct

        return [
            layer.register_forward_hook(correction(name, self.down[name], self.up[name]))
            for name, layer in layers.items()
        ]


class RowAdam(RowTensors):
    """Adam with a step count per row, because rows are reset at different times. `tensors`, with
    rows in the first dimension, are written in place."""

    def __init__(self, tensors: list[Tensor], learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._tensors = tensors
        self._means = [torch.zeros_like(tensor) for tensor in tensors]
        self._squares = [torch.zeros_like(tensor) for tensor in tensors]
        self._steps = torch.zeros(len(tensors[0]), 1, 1, dtype=torch.float64, device=tensors[0].device)  # [rows, 1, 1]
        super().__init__([*self._means, *self._squares, self._steps])

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learns: Tensor) -> None:
        """Takes one step by the gradients of every tensor, for the first rows that learn (`[n <= rows]` bool). Other
        moments do not change."""
        (index,) = learns.nonzero(as_tuple=True)  # [m]
        self._steps[index] += 1
        counts = self._steps[index]  # [m, 1, 1]
        beta1, beta2 = _BETAS
        for tensor, mean, square, gradient in zip(self._tensors, self._means, self._squares, gradients, strict=True):
            learning = gradient[index]  # [m, ...]
            mean[index] = new_mean = mean[index].lerp(learning, 1 - beta1)
            square[index] = new_square = square[index].lerp(learning.square(), 1 - beta2)
            denominator = (new_square / (1 - beta2**counts)).sqrt().to(tensor.dtype) + _EPSILON
            tensor[index] -= self.learning_rate * (new_mean / (1 - beta1**counts)).to(tensor.dtype) / denominator

    def state_dict(self) -> dict[str, Any]:
        """Moments and counts, for a checkpoint."""
        return {"means": self._means, "squares": self._squares, "steps": self._steps}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the result of :meth:`state_dict` for tensors of the same shapes."""
        saved = [*state["means"], *state["squares"], state["steps"]]
        for tensor, value in zip(self._by_row, saved, strict=True):
            tensor.copy_(value)


class AdapterLearner(Learner):
    """Trains low-rank corrections of the drafter's layers, whose weights do not change."""

    def __init__(self, drafter: TrainableDrafter, learning_rate: float, rows: int, rank: int) -> None:
        self.rows, self.learning_rate = rows, learning_rate
        self.network, self.initial = (_copy_that_learns(drafter.network) for _ in range(2))
        drafting, learning = drafter.projections(drafter.network), drafter.projections(self.network)
        self._drafting, self._learning = RowAdapters(drafting, rows, rank), RowAdapters(learning, rows, rank)
        self._handles = self._drafting.attach(drafting, lambda: drafter.cache.first_row)
        self._learning.attach(learning, lambda: 0)
        self.tensors = [tensor.requires_grad_() for tensor in self._learning.tensors]
        self.published = self._drafting.tensors
        self._adam = RowAdam(self.tensors, learning_rate)
        self._by_row = (self._drafting, self._learning, self._adam)

    def step(self, gradients: Sequence[Tensor | None], drafted: Tensor) -> None:
        full = [g if g is not None else torch.zeros_like(t) for g, t in zip(gradients, self.tensors, strict=True)]
        self._adam.step(full, drafted if self.rows > 1 else drafted.any(0, keepdim=True))

    @torch.no_grad()
    def reset(self, rows: Iterable[int]) -> None:
        chosen = list(rows) if self.rows > 1 else [0]
        for part in self._by_row:
            part.reset(chosen)

    @torch.no_grad()
    def move(self, source: list[int], destination: list[int]) -> None:
        if self.rows > 1 and source:
            for part in self._by_row:
                part.move(source, destination)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": [tensor.detach() for tensor in self._saved()], "moments": self._adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _copy_tensors(state["tensors"], self._saved())
        for name, down in self._drafting.down.items():
            down.copy_(self._learning.down[name])
        self._adam.load_state_dict(state["moments"])
        self.publish()

    def _saved(self) -> list[Tensor]:
        return [*self.tensors, *self._learning.down.values()]  # `down` has the scale of the layers at the beginning

    @property
    def bytes(self) -> int:
        return self._drafting.bytes + 2 * self._learning.bytes + self._adam.bytes


def _copy_that_learns(network: nn.Module) -> Any:
    copied = share_weights(network)
    for module in copied.modules():
        if isinstance(module, PackedLayer):
            module.passes_gradient = True
    return copied


@torch.no_grad()
def _copy_tensors(saved: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copies `saved` into `targets`; raises ValueError, and changes nothing, where numbers or shapes differ."""
    shapes, wanted = ([tuple(tensor.shape) for tensor in tensors] for tensors in (saved, targets))
    if shapes != wanted:
        odd = [shape for shape in shapes if shape not in wanted][:3]
        raise ValueError(f"it has {len(shapes)} tensors for {len(wanted)}, or of other shapes: {odd or shapes[:3]}.")
    for tensor, value in zip(targets, saved, strict=True):
        tensor.copy_(value)


def make_learner(
    drafter: TrainableDrafter, rows: int, learning_rate: float | None, rank: int, keeps_initial: bool
) -> Learner:
    """Trains all weights if the drafter has unshared ones and `rows` is 1 (all rows learn together); else low-rank
    corrections. A `learning_rate` η of None means the drafter's `weight_rate` / width, or
    `CORRECTION_RATE`."""
    if rows == 1 and drafter.trained(drafter.network):
        return WeightLearner(drafter, learning_rate or drafter.weight_rate / drafter.width, keeps_initial)
    return AdapterLearner(drafter, learning_rate or CORRECTION_RATE, rows, rank)
