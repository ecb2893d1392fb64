"""Carries weights into a running vLLM: tensors of this process, or a file that a server on this machine reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


Weights = Iterable[tuple[str, Tensor]]
_parcels: dict[int, Weights] = {}
_numbers = count(1)


def hand_over(weights: Weights) -> dict[str, Any]:
    """The `update_info` with which a vLLM in this process takes `weights`."""
    number = next(_numbers)
    _parcels[number] = weights
    return {"parcel": number}


@dataclass
class Nothing(WeightTransferInitInfo):
    """A transport within a machine needs no address."""


@dataclass
class Source(WeightTransferUpdateInfo):
    """Where the weights are: in a safetensors file, or in a `parcel` of :func:`hand_over`."""

    path: str = ""
    parcel: int = 0


class Transport(WeightTransferEngine[Nothing, Source]):
    """The weight transfer engine "spec_trl" of vLLM, for its policy and its drafter."""

    init_info_cls, update_info_cls = Nothing, Source

    def init_transfer_engine(self, init_info: Nothing) -> None:
        return

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)  # layers that were packed or quantized take plain weights again

    def receive_weights(self, update_info: Source) -> None:
        if update_info.path and not Path(update_info.path).is_file():
            raise ValueError(f"there is no file {update_info.path}; the server must run on the trainer's machine")
        weights = load_file(update_info.path).items() if update_info.path else _parcels.pop(update_info.parcel)
        self.model.load_weights(iter(weights))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        return
