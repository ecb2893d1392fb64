"""Hooks for families whose forwards take no positions, or the same mask for all layers.

Most families of transformers take `position_ids` and a mask per type of layer. BART's relatives and layers of Llama 4
read the cache's length instead, as if all rows had the same; GPT-Neo passes one mask to all layers.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import GPT_NEO_LAYERS, MaskPlan


CACHE_NAMES = "cache", "past_key_values", "cache_params"
"""Names of the K/V cache among arguments of forwards: since transformers 5.24, and before."""


def forward_parameters(kind: type) -> frozenset[str]:
    """Names of the parameters that the forward of a module class takes."""
    return _parameters(kind)


@functools.cache  # reading a signature takes as long as running a small layer; type checkers know no cached `type`
def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


def cache_name(kind: type) -> str:
    """Name of the K/V cache in the forward of a module class; "": none of the known names."""
    return next((name for name in CACHE_NAMES if name in forward_parameters(kind)), "")


def cache_argument(network: PreTrainedModel) -> str:
    """The same for `network`, or for the decoder that gets its keywords."""
    return cache_name(type(network)) or cache_name(type(network.get_decoder()))


def takes_positions(network: PreTrainedModel) -> bool:
    """Whether the forward takes `position_ids`, or passes its keywords on to a decoder that does."""
    return any("position_ids" in forward_parameters(type(module)) for module in (network, network.get_decoder()))


def position_tables(network: PreTrainedModel) -> list[nn.Module]:
    """Modules that embed positions, counted from the cache's length unless they get `position_ids`; empty if one of
    them takes no `position_ids`."""
    lengths = {f"{name}_length" for name in CACHE_NAMES}
    tables = [module for module in network.modules() if lengths & forward_parameters(type(module))]
    return tables if all("position_ids" in forward_parameters(type(table)) for table in tables) else []


@functools.cache
def asks_for_length(kind: Any) -> bool:
    """Whether the forward of a layer's class reads the cache's length, as if all rows had the same."""
    forward = inspect.unwrap(kind.forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    asks = not issubclass(kind, PreTrainedModel) and not _LENGTHS.isdisjoint(names)  # a model gets position_ids
    return asks and kind.__name__ not in _LENGTH_UNUSED


_LENGTHS = {"get_seq_length", "get_mask_sizes", "get_query_offset"}
# The first gets a hook (`_scale_queries`). The others ask in cross-attention, which does not run for text.
_LENGTH_UNUSED = "Llama4TextAttention", "BigBirdSelfAttention", "MllamaTextCrossAttention"


def adapt(shadow: PreTrainedModel) -> None:
    """Makes `shadow`, of any family, take `position_ids` and the masks of its plan."""
    if {_keep_positions, _keep_masks} & set(shadow._forward_pre_hooks.values()):
        return  # a shadow of a shadow
    if not takes_positions(shadow):
        tables = position_tables(shadow)
        for table in tables:
            table.register_forward_pre_hook(_pass_positions, with_kwargs=True)
            table.register_forward_hook(_unfold)
        names = tuple(name for name, module in shadow.named_modules() if module in tables)
        shadow._spec_trl_tables = names  # names, because clones take them over
        shadow.register_forward_pre_hook(_keep_positions, with_kwargs=True)
    for layer in shadow.get_decoder().modules():
        if type(layer).__name__ == "Llama4TextDecoderLayer":
            attention: Any = layer.self_attn
            if attention.attn_temperature_tuning and not attention.use_rope:
                attention.attn_temperature_tuning = False
                layer.register_forward_pre_hook(_scale_queries, with_kwargs=True)
    if shadow.config.model_type == "gpt_neo":
        for layer, name in zip(shadow.get_decoder().h, shadow.config.attention_layers, strict=True):
            layer._spec_trl_mask_name = GPT_NEO_LAYERS[name]  # a trial of exactness runs the first layers alone
            layer.register_forward_pre_hook(_take_mask, with_kwargs=True)
        shadow.register_forward_pre_hook(_keep_masks, with_kwargs=True)


Hooked = tuple[tuple[Any, ...], dict[str, Any]]


# Positions and masks are passed as attributes of modules, which are separate in clones of a network.
def _keep_positions(network: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    positions = kwargs.pop("position_ids", None)
    for name in network._spec_trl_tables:
        network.get_submodule(name)._spec_trl_positions = positions
    return args, kwargs


def _pass_positions(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    positions = table._spec_trl_positions
    # Flat: some tables add a batch axis in front.
    return args, kwargs if positions is None else kwargs | {"position_ids": positions.flatten()}


def _unfold(table: Any, _: tuple[Any, ...], output: Tensor) -> Tensor:
    positions = table._spec_trl_positions
    return output if positions is None else output.view(*positions.shape, -1)  # [B, q, hidden]


def _keep_masks(network: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    masks: Any = kwargs.get("attention_mask")
    if masks is None:  # a forward over whole rows, without a cache
        tokens = args[0] if args else kwargs["input_ids"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # [B, T]
        masks = MaskPlan.from_config(network.config).build(positions, tokens.shape[1], network.dtype)
    for layer in network.get_decoder().h:
        layer._spec_trl_mask = masks[layer._spec_trl_mask_name]
    return args, kwargs | {"attention_mask": layer._spec_trl_mask}


def _take_mask(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    return args, kwargs | {"attention_mask": layer._spec_trl_mask}


def _scale_queries(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
    attention, positions = layer.self_attn, kwargs["position_ids"]  # [B, q]
    steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
    scales = torch.log1p(steps) * attention.attn_scale + 1.0
    return args, kwargs | {"query_scales": scales[:, None, :, None]}  # [B, 1, q, 1]
