"""Ways into forwards that take no positions, or the same mask for all layers: a shadow gets hooks that lead there.

Most families of transformers take `position_ids` and a mask for each type of layer. BART's kin ask the cache for its
length instead, and GPT-Neo cuts the windows of its local layers out of a buffer; both mean one length for all rows.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import GPT_NEO_LAYERS


def forward_parameters(module: nn.Module) -> set[str]:
    """Names of what the forward of the module's class takes."""
    return set(inspect.signature(type(module).forward).parameters)


def takes_positions(network: PreTrainedModel) -> bool:
    """Whether the forward takes `position_ids`; a forward that passes its keywords on may leave them to the decoder."""
    return any("position_ids" in forward_parameters(module) for module in (network, network.get_decoder()))


def position_tables(network: PreTrainedModel) -> list[nn.Module]:
    """Modules that embed positions, which they count from the cache's length unless they are told them.

    Empty where one of them cannot be told.
    """
    tables = [module for module in network.modules() if "past_key_values_length" in forward_parameters(module)]
    return tables if all("position_ids" in forward_parameters(table) for table in tables) else []


def adapt(shadow: PreTrainedModel) -> None:
    """Has `shadow`, whatever its family, take `position_ids` and the masks of its plan, like any other."""
    if not takes_positions(shadow):
        for table in position_tables(shadow):
            table.register_forward_pre_hook(_tell_positions, with_kwargs=True)
            table.register_forward_hook(_unfold)
        shadow.register_forward_pre_hook(_hand_out_positions, with_kwargs=True)
    if shadow.config.model_type == "gpt_neo":
        for layer in shadow.get_decoder().h:
            attention = layer.attn.attention
            # The additive mask says it all. A view of one element, as wide as any cache.
            everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=attention.bias.device)
            attention._buffers = attention._buffers | {"bias": everything.expand(1, 1, 2**20, 2**20)}
            layer.register_forward_pre_hook(_take_mask, with_kwargs=True)
        shadow.register_forward_pre_hook(_hand_out_masks, with_kwargs=True)


Hooked = tuple[tuple[Any, ...], dict[str, Any]]


# What is handed out lies on the modules: a network's clone has modules of its own, and so a second thread.
def _hand_out_positions(network: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    positions = kwargs.pop("position_ids", None)
    if positions is not None:
        for table in position_tables(network):
            table._spec_trl_positions = positions
    return args, kwargs


def _tell_positions(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    # Flat: some tables put a batch axis of their own in front.
    return args, kwargs | {"position_ids": table._spec_trl_positions.flatten()}


def _unfold(table: nn.Module, _: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.view(*table._spec_trl_positions.shape, -1)  # [B, q, hidden]


def _hand_out_masks(network: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    masks = kwargs["attention_mask"]
    if isinstance(masks, dict):
        for layer, name in zip(network.get_decoder().h, network.config.attention_layers, strict=True):
            layer._spec_trl_mask = masks[GPT_NEO_LAYERS[name]]
        kwargs = kwargs | {"attention_mask": layer._spec_trl_mask}
    return args, kwargs


def _take_mask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    return args, kwargs | {"attention_mask": layer._spec_trl_mask}
