"""What learns in a drafter, and how it takes a step: all weights of a copy, or low-rank corrections of rows.

A learner works on a module tree of its own, at least in float32, so that drafting can go on meanwhile; what it has
learned reaches the drafting network in `publish`, in place.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....quantization.experts import QuantizedExperts
from ....quantization.linear import QuantizedLinear
from ...engine.shadow import share_weights
from ..canvas import TrainableDrafter
from .row_adapters import RowAdam, RowAdapters


CORRECTION_RATE = 3e-4
"""η of low-rank corrections, which are relative to the layer's own scale."""


class Learner(ABC):
    """What one drafter has learned so far.

    Attributes:
        network: the copy of the drafting network that learns.
        tensors: that are learned, each with gradient.
        rows: cache rows that learn each for itself; 1: all together.
    """

    network: nn.Module
    tensors: list[Tensor]
    rows: int

    @abstractmethod
    def step(self, gradients: Sequence[Tensor | None], drafted: Tensor) -> None:
        """One step of Adam on `tensors`, learned from those of the cache's first rows that `drafted`, `[B]` bool."""

    @abstractmethod
    def publish(self) -> None:
        """Gives the drafting network what has been learned."""

    @abstractmethod
    def reset(self, rows: Iterable[int]) -> None:
        """Takes back what cache rows `rows` have learned, moments included."""

    @abstractmethod
    def move(self, source: list[int], destination: list[int]) -> None:
        """Cache rows `source` are now rows `destination`."""

    @abstractmethod
    def release(self) -> None:
        """Leaves the drafting network as it was before there was a learner."""

    @abstractmethod
    def initial(self) -> nn.Module:
        """A network with the weights of the beginning, q_0."""

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, moments included, for a checkpoint: the tensors themselves, not copies."""
        return {"tensors": [tensor.detach() for tensor in self._kept()]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave, and publishes it.

        Raises:
            ValueError: its tensors are not as many, or not of the shapes, of those here; nothing is changed.
        """
        saved, own = ([tuple(tensor.shape) for tensor in tensors] for tensors in (state["tensors"], self._kept()))
        if saved != own:
            odd = [shape for shape in saved if shape not in own][:3]
            raise ValueError(f"it has {len(saved)} tensors for {len(own)}, or of other shapes: {odd or saved[:3]}.")
        for tensor, value in zip(self._kept(), state["tensors"], strict=True):
            tensor.copy_(value)

    def _kept(self) -> list[Tensor]:
        """What a checkpoint keeps of the network that learns."""
        return self.tensors

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes it takes beside the drafting network, gradients included."""


class WeightLearner(Learner):
    """Learns all of a drafter's own weights (TTS §4.1), for all rows together.

    Args:
        drafter: whose weights are nobody else's.
        learning_rate: η of Adam.
        keeps_initial: whether `initial` will be asked for.
    """

    rows = 1

    def __init__(self, drafter: TrainableDrafter, learning_rate: float, keeps_initial: bool) -> None:
        drafting = drafter.trained(drafter.network)
        # A step of Adam is far below the spacing of bfloat16 numbers: there it would be rounded away.
        wide = torch.promote_types(drafting[0].dtype, torch.float32)
        self.network = copy.deepcopy(drafter.network).to(wide).requires_grad_(False)
        self.tensors = [parameter.requires_grad_() for parameter in drafter.trained(self.network)]
        self._drafting = [parameter.data for parameter in drafting]
        self._first = [tensor.clone() for tensor in self._drafting]
        self._initial = copy.deepcopy(self.network).requires_grad_(False) if keeps_initial else None
        self._learning_rate = learning_rate
        self._forget()

    def _forget(self) -> None:
        self._optimizer = torch.optim.Adam(self.tensors, self._learning_rate, fused=True)

    def step(self, gradients: Sequence[Tensor | None], drafted: Tensor) -> None:
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def publish(self) -> None:
        torch._foreach_copy_(self._drafting, self.tensors)

    @torch.no_grad()
    def reset(self, rows: Iterable[int]) -> None:
        torch._foreach_copy_(self._drafting, self._first)
        torch._foreach_copy_(self.tensors, self._first)
        self._forget()

    def move(self, source: list[int], destination: list[int]) -> None:
        """Nothing: all rows share what is learned."""

    @torch.no_grad()
    def release(self) -> None:
        torch._foreach_copy_(self._drafting, self._first)

    def initial(self) -> nn.Module:
        assert self._initial is not None
        return self._initial

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"moments": self._optimizer.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        moments = copy.deepcopy(state["moments"])  # torch would go on in the caller's tensors
        super().load_state_dict(state)
        groups = self._optimizer.state_dict()["param_groups"]  # the learning rate is this run's
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.publish()

    @property
    def bytes(self) -> int:
        learned = sum(tensor.nbytes for tensor in self.tensors)
        copies = [self.network] if self._initial is None else [self.network, self._initial]
        held = [*(p for network in copies for p in network.parameters()), *self._first]
        return sum(tensor.nbytes for tensor in held) + 3 * learned  # gradients and two moments


class AdapterLearner(Learner):
    """Learns low-rank corrections over the drafter's weights, which stay as they are.

    Args:
        drafter: whose forwards are corrected.
        learning_rate: η of Adam.
        rows: cache rows that learn each for itself; 1: one correction for all.
        rank: of the corrections.
    """

    def __init__(self, drafter: TrainableDrafter, learning_rate: float, rows: int, rank: int) -> None:
        self.rows = rows
        self.network, self._initial = (_copy_that_learns(drafter.network) for _ in range(2))
        drafting, learning = drafter.projections(drafter.network), drafter.projections(self.network)
        self._drafting, self._learning = RowAdapters(drafting, rows, rank), RowAdapters(learning, rows, rank)
        self._handles = self._drafting.attach(drafting, lambda: drafter.cache.first_row)
        self._learning.attach(learning, lambda: 0)
        self.tensors = [tensor.requires_grad_() for tensor in self._learning.tensors]
        self._adam = RowAdam(self.tensors, learning_rate)

    def step(self, gradients: Sequence[Tensor | None], drafted: Tensor) -> None:
        found = [g if g is not None else torch.zeros_like(t) for g, t in zip(gradients, self.tensors, strict=True)]
        self._adam.step(found, drafted if self.rows > 1 else drafted.any(0, keepdim=True))

    @torch.no_grad()
    def publish(self) -> None:
        self._drafting.copy_from(self._learning)

    @torch.no_grad()
    def reset(self, rows: Iterable[int]) -> None:
        which = list(rows) if self.rows > 1 else [0]
        for part in (self._drafting, self._learning, self._adam):
            part.reset(which)

    @torch.no_grad()
    def move(self, source: list[int], destination: list[int]) -> None:
        if self.rows > 1 and source:
            for part in (self._drafting, self._learning, self._adam):
                part.move(source, destination)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()

    def initial(self) -> nn.Module:
        return self._initial

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"moments": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, down in self._drafting.down.items():
            down.copy_(self._learning.down[name])
        self._adam.load_state_dict(state["moments"])
        self.publish()

    def _kept(self) -> list[Tensor]:
        # `down` has the scale that the layers had when it was made.
        return [*self.tensors, *self._learning.down.values()]

    @property
    def bytes(self) -> int:
        return self._drafting.bytes + 2 * self._learning.bytes + self._adam.bytes


def _copy_that_learns(network: nn.Module) -> Any:
    copied = share_weights(network)
    for module in copied.modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            module.passes_gradient = True
    return copied


def make_learner(
    drafter: TrainableDrafter, rows: int, learning_rate: float | None, rank: int, keeps_initial: bool
) -> Learner:
    """All weights where the drafter has some of its own and all rows learn together; else low-rank corrections.

    Args:
        drafter: that learns.
        rows: cache rows that learn each for itself; 1: all together.
        learning_rate: η; None: the drafter's `weight_rate` over its width, or `CORRECTION_RATE`.
        rank: of corrections.
        keeps_initial: whether q_0 will be asked for.
    """
    if rows == 1 and drafter.trained(drafter.network):
        return WeightLearner(drafter, learning_rate or drafter.weight_rate / drafter.width, keeps_initial)
    return AdapterLearner(drafter, learning_rate or CORRECTION_RATE, rows, rank)
