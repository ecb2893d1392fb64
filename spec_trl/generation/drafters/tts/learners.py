"""What changes in a drafter that learns, and how: all of its weights, or low-rank corrections of its layers.

A learner works on a copy of the drafting network, at least in float32, so that drafting can go on meanwhile. `publish`
then copies what was learned into the drafting network, in place.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....quantization.linear import PackedLayer
from ...engine.shadow import share_weights
from ..canvas import TrainableDrafter
from .row_adapters import RowAdam, RowAdapters


CORRECTION_RATE = 3e-4
"""η of low-rank corrections, which are relative to the layer's own scale."""


class Learner(ABC):
    """What one drafter has learned so far.

    Attributes:
        network: the copy of the drafting network that learns.
        initial: a network with the weights before any learning, q_0; None where nobody asks for it.
        tensors: what is learned, each with gradient.
        published: where drafting reads it; captured forwards too, so it is written in place.
        rows: number of separate adapters, one per cache row; 1 = all rows share what is learned.
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
        """One step of Adam by the `gradients` of `tensors`, which come from the first rows `drafted` (`[B]` bool)."""

    @torch.no_grad()
    def publish(self) -> None:
        """Copies what has been learned into the drafting network."""
        torch._foreach_copy_(self.published, self.tensors)

    @abstractmethod
    def reset(self, rows: Iterable[int]) -> None:
        """Takes back what cache rows `rows` have learned, Adam's moments included."""

    @abstractmethod
    def move(self, source: list[int], destination: list[int]) -> None:
        """Cache rows `source` are now rows `destination`."""

    @abstractmethod
    def release(self) -> None:
        """Leaves the drafting network as it was before there was a learner."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What has been learned, moments included, for a checkpoint: the tensors themselves, not copies."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over and publishes what :meth:`state_dict` gave; raises ValueError, and changes nothing, where its
        tensors have other shapes."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that learning takes in addition to the drafting network, gradients included."""


class WeightLearner(Learner):
    """Learns all of a drafter's own weights (TTS §4.1), for all rows together."""

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
        """Nothing moves: all rows share what is learned."""

    @torch.no_grad()
    def release(self) -> None:
        torch._foreach_copy_(self.published, self._first)

    def state_dict(self) -> dict[str, Any]:
        tensors = [tensor.detach() for tensor in self.tensors]
        return {"tensors": tensors, "moments": self._optimizer.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        moments = copy.deepcopy(state["moments"])  # torch would go on in the caller's tensors
        _copy_tensors(state["tensors"], self.tensors)
        groups = self._optimizer.state_dict()["param_groups"]  # the learning rate is this run's
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.publish()

    @property
    def bytes(self) -> int:
        copies = [network for network in (self.network, self.initial) if network is not None]
        held = [*(p for network in copies for p in network.parameters()), *self._first]
        return sum(tensor.nbytes for tensor in [*held, *3 * self.tensors])  # gradients and two moments


class AdapterLearner(Learner):
    """Learns low-rank corrections of the drafter's layers, whose weights stay as they are."""

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
        found = [g if g is not None else torch.zeros_like(t) for g, t in zip(gradients, self.tensors, strict=True)]
        self._adam.step(found, drafted if self.rows > 1 else drafted.any(0, keepdim=True))

    @torch.no_grad()
    def reset(self, rows: Iterable[int]) -> None:
        which = list(rows) if self.rows > 1 else [0]
        for part in self._by_row:
            part.reset(which)

    @torch.no_grad()
    def move(self, source: list[int], destination: list[int]) -> None:
        if self.rows > 1 and source:
            for part in self._by_row:
                part.move(source, destination)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": [tensor.detach() for tensor in self._kept()], "moments": self._adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _copy_tensors(state["tensors"], self._kept())
        for name, down in self._drafting.down.items():
            down.copy_(self._learning.down[name])
        self._adam.load_state_dict(state["moments"])
        self.publish()

    def _kept(self) -> list[Tensor]:
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
def _copy_tensors(saved: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Copies `saved` into `own`; raises ValueError, and changes nothing, where numbers or shapes differ."""
    shapes, wanted = ([tuple(tensor.shape) for tensor in tensors] for tensors in (saved, own))
    if shapes != wanted:
        odd = [shape for shape in shapes if shape not in wanted][:3]
        raise ValueError(f"it has {len(shapes)} tensors for {len(wanted)}, or of other shapes: {odd or shapes[:3]}.")
    for tensor, value in zip(own, saved, strict=True):
        tensor.copy_(value)


def make_learner(
    drafter: TrainableDrafter, rows: int, learning_rate: float | None, rank: int, keeps_initial: bool
) -> Learner:
    """All weights learn where the drafter owns some and `rows` is 1 (all rows learn together); else low-rank
    corrections do. A `learning_rate` η of None is the drafter's `weight_rate` / width, or `CORRECTION_RATE`."""
    if rows == 1 and drafter.trained(drafter.network):
        return WeightLearner(drafter, learning_rate or drafter.weight_rate / drafter.width, keeps_initial)
    return AdapterLearner(drafter, learning_rate or CORRECTION_RATE, rows, rank)
